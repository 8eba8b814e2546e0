"""What in a journal speaks against a run, judged against the run's own noise: losses may be
negative, huge or swing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from stepguard.report import phrases
from stepguard.report.summary import Record, calibration_steps

Weight = Literal["attention", "unhealthy"]
RECENT = 48
"""Steps that stand for how the run is now."""
FEW, SEVERAL, MANY = 4, 8, 16
BLOCKS = 24
"""Parts of a run whose middle losses are compared."""
GONE = 0.5
"""Share of what was learned whose loss asks for attention."""
ABOVE_NOISE = 4.0
ORDINARY, RECOVERED = 1.25, 0.6
"""A rise up to so many times one that was made good is ordinary; made good is what went back by
this share.
"""
JUMP, RUIN = 100.0, 1e4
"""Times the highest level of the first half, and times the level at the start."""
LEAST_LEVEL = 1e-3
"""A level below this is no measure: 100 times almost nothing is still little."""
TINY_CLIP = 1e-4
PATIENCE, STEPS_MISSED, PAUSES = 60.0, 50, 4
"""A silence is long beyond this many seconds, usual steps, and longest pauses so far, whichever is
most.
"""
BY_HAND = ("KeyboardInterrupt", "SystemExit")
NOTHING_TO_LEARN = ("no_labels", "zero_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """One thing that is not as it should be."""

    weight: Weight
    text: str


def concerns(record: Record) -> tuple[Concern, ...]:
    """Everything the journal holds against the run, worst first. Pure."""
    found = [concern for look in LOOKS for concern in look(record)]
    return tuple(sorted(found, key=lambda concern: concern.weight != "unhealthy"))


def silence(record: Record, idle: float) -> Concern | None:
    """A run that is not over and has written nothing for `idle` seconds."""
    if ended(record) is not None:
        return None
    taken = [line["seconds"] for line in record.steps if phrases.finite(line.get("seconds"))]
    usual = median(taken) if taken else 0.0
    longest = max(taken, default=0.0)
    if idle <= max(PATIENCE, STEPS_MISSED * usual, PAUSES * longest):
        return None
    known = (
        f"; a step usually takes {phrases.number(usual)} s"
        if taken
        else " and no step was made yet"
    )
    return Concern(
        weight="attention",
        text=f"nothing was written for {idle:,.0f} s{known}: it hangs, or was killed",
    )


def ended(record: Record) -> dict[str, Any] | None:
    """The last line of a run that was closed."""
    return next((dict(line) for line in reversed(record.notes) if line.get("type") == "end"), None)


def _no_step(record: Record) -> Iterator[Concern]:
    if not record.steps and ended(record) is not None:
        yield Concern(weight="unhealthy", text="the run ended without a single step")


def _exception(record: Record) -> Iterator[Concern]:
    """The program raised, and nothing came after it."""
    last = record.incidents[-1] if record.incidents else None
    if last is None or str(last.verdict.kind) != "exception":
        error = str((ended(record) or {}).get("error") or "")
        if error and not error.startswith(BY_HAND):
            yield Concern(
                weight="unhealthy", text=f"an exception outside of a step ended the run: {error}"
            )
        return
    if not record.steps or record.steps[-1]["step"] <= last.step:
        what = last.verdict.summary or "an exception"
        yield Concern(weight="unhealthy", text=f"step {last.step} ended with an exception: {what}")


def _disarmed(record: Record) -> Iterator[Concern]:
    fault = next((line for line in reversed(record.notes) if line.get("type") == "fault"), None)
    end = ended(record)
    if fault is not None:
        since = f" since step {fault['step']}" if "step" in fault else ""
        yield Concern(
            weight="attention",
            text=f"the guard is disarmed{since}: {fault.get('error', 'it failed')}",
        )
    elif end is not None and end.get("armed") is False:
        yield Concern(
            weight="attention",
            text="the guard was disarmed when the run ended: its last steps are unchecked",
        )


def _dropped(record: Record) -> Iterator[Concern]:
    """Steps that GradScaler gives up while it looks for its scale do not count, unless it never
    finds one.
    """
    tail = record.steps[-RECENT:]
    if len(tail) == RECENT and not any(line.get("committed", True) for line in tail):
        yield Concern(weight="unhealthy", text=f"no step was committed in the last {RECENT}")
        return
    looking = calibration_steps(tail, record.incidents)
    dropped = [not line.get("committed", True) and line["step"] not in looking for line in tail]
    if sum(dropped) > len(tail) // 2:
        yield Concern(
            weight="unhealthy", text=f"{sum(dropped)} of the last {len(tail)} steps were dropped"
        )
    elif len(tail) >= SEVERAL and all(dropped[-SEVERAL:]):
        yield Concern(weight="unhealthy", text=f"no step was committed in the last {SEVERAL}")


def _not_finite(record: Record) -> Iterator[Concern]:
    """Committed with a loss that is none: nobody stopped it."""
    tail = [line for line in record.steps if line.get("committed", True) and "loss" in line][
        -SEVERAL:
    ]
    bad = sum(not phrases.finite(line["loss"]) for line in tail)
    if bad > len(tail) // 2:
        yield Concern(
            weight="unhealthy",
            text=f"the loss of {bad} of the last {len(tail)} committed steps is not finite",
        )


def _rate_zero(record: Record) -> Iterator[Concern]:
    tail = [line["lr"] for line in record.steps if line.get("lr")][-SEVERAL:]
    if len(tail) >= FEW and all(rate == 0 for rates in tail for rate in _several(rates)):
        text = (
            f"the learning rate is 0 in every group, in the last {len(tail)} steps: nothing is "
            f"learned"
        )
        yield Concern(weight="attention", text=text)


def _several(rates: Any) -> Sequence[float]:
    return rates if isinstance(rates, list | tuple) else (rates,)


def _stands_still(record: Record) -> Iterator[Concern]:
    """No gradient, or always the same loss. A loss of 0 is left alone: there may be nothing left to
    learn.
    """
    tail = [line for line in record.steps if line.get("committed", True)][-2 * MANY :]
    norms = [
        line["grad_norm"]
        for line in tail[-MANY:]
        if line.get("grad_norm") is not None and line.get("loss") != 0
    ]
    losses = [
        line["loss"] for line in tail if phrases.finite(line.get("loss")) and line["loss"] != 0
    ]
    if len(norms) == MANY and not any(norms):
        yield Concern(
            weight="attention",
            text=f"every gradient of the last {MANY} steps is 0: nothing is learned",
        )
    elif len(losses) == 2 * MANY and len(set(losses)) == 1:
        same = phrases.number(losses[-1])
        text = (
            f"the loss is {same} to the last bit in the last {len(losses)} steps: nothing is "
            f"learned"
        )
        yield Concern(weight="attention", text=text)


def _clipped_away(record: Record) -> Iterator[Concern]:
    tail = [
        line["clip_factor"] for line in record.steps if phrases.finite(line.get("clip_factor"))
    ][-MANY:]
    if len(tail) == MANY and max(tail) < TINY_CLIP:
        text = (
            f"clipping leaves {phrases.number(max(tail))} of the gradient or less, in the last "
            f"{MANY} steps"
        )
        yield Concern(weight="attention", text=text)


def _nothing_to_learn(record: Record) -> Iterator[Concern]:
    tail = {line["step"] for line in record.steps[-RECENT:]}
    told = {
        line.get("step") for line in record.notes if line.get("kind") in NOTHING_TO_LEARN
    } & tail
    if len(tail) >= SEVERAL and len(told) > len(tail) // 2:
        text = (
            f"{len(told)} of the last {len(tail)} steps had no label, or a loss of 0 without a "
            f"gradient"
        )
        yield Concern(weight="attention", text=text)


def _level(record: Record) -> Iterator[Concern]:
    """Where the loss is, where it began, and the best it has been: by medians of equal parts of the
    run.
    """
    losses = [
        line["loss"]
        for line in record.steps
        if line.get("committed", True) and phrases.finite(line.get("loss"))
    ]
    size = max(FEW, len(losses) // BLOCKS)
    blocks = [losses[end - size : end] for end in range(len(losses), size - 1, -size)][::-1]
    if len(blocks) < 2:
        return
    levels = [median(block) for block in blocks]
    noise = _noise(blocks, levels)
    now, start, best = min(levels[-2:]), levels[0], min(levels[:-1])
    before = max(abs(level) for level in levels[: (len(levels) + 1) // 2])
    numbers = (
        f"it is at {phrases.number(levels[-1])}, began at {phrases.number(losses[0])}, was "
        f"at {_best(losses)}"
    )
    began_at = max(abs(losses[0]), _spread(blocks[0]), LEAST_LEVEL)
    if levels[-1] > RUIN * began_at:
        yield Concern(weight="unhealthy", text=f"the loss has run away: {numbers}")
        return
    if now - best <= max(ABOVE_NOISE * noise, ORDINARY * _came_back(levels)):
        return
    if now > JUMP * max(before, LEAST_LEVEL):
        yield Concern(weight="unhealthy", text=f"the loss has run away: {numbers}")
    elif start - best > ABOVE_NOISE * noise and now - best > GONE * (start - best):
        share = (now - best) / (start - best)
        lost = "all of it" if share >= 1 else f"{share:.0%} of it"
        yield Concern(weight="attention", text=f"what was learned is gone again, {lost}: {numbers}")


def _best(losses: Sequence[float]) -> str:
    return phrases.number(min(losses))


def _came_back(levels: Sequence[float]) -> float:
    """The largest rise that the run has already seen and mostly made good again: losses of two
    opponents do that.
    """
    largest, lowest = 0.0, levels[0]
    for position, level in enumerate(levels[:-1]):
        rise = level - lowest
        if rise > largest and min(levels[position + 1 :]) <= level - rise * RECOVERED:
            largest = rise
        lowest = min(lowest, level)
    return largest


def _noise(blocks: Sequence[Sequence[float]], levels: Sequence[float]) -> float:
    """How far the loss of a healthy stretch of this run is from one part to the next, and within
    one.

    The last quarter is left out: it is what is being judged.
    """
    known = max(2, len(levels) - max(2, len(levels) // 4))
    swings = sorted(abs(after - before) for before, after in pairwise(levels[:known]))
    usual = swings[int(0.75 * (len(swings) - 1))] if swings else 0.0
    return max(usual, median([_spread(block) for block in blocks[:known]]))


def _spread(losses: Sequence[float]) -> float:
    level = median(losses)
    return median([abs(loss - level) for loss in losses])


LOOKS: tuple[Callable[[Record], Iterator[Concern]], ...] = (
    _no_step,
    _exception,
    _dropped,
    _not_finite,
    _level,
    _disarmed,
    _rate_zero,
    _stands_still,
    _clipped_away,
    _nothing_to_learn,
)
