"""Find what in a journal speaks against a run.

Losses are judged against the run's own noise: they may be negative, huge or swing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from stepguard.report import phrases
from stepguard.report.step_lines import committed, finite_values
from stepguard.report.summary import Record, calibration_steps

Weight = Literal["attention", "unhealthy"]
RECENT = 48
"""Steps that stand for how the run is now."""
FEW = 4
SEVERAL = 8
MANY = 16
BLOCKS = 24
"""Parts of a run whose middle losses are compared."""
GONE = 0.5
"""Share of what was learned whose loss asks for attention."""
ABOVE_NOISE = 4.0
RECOVERED = 0.6
"""A rise was made good if the loss went back by this share of it."""
ORDINARY = 1.25
"""A rise up to so many times one that was made good is ordinary."""
JUMP = 100.0
"""Times the highest level of the first half."""
RUIN = 1e4
"""Times the level at the start."""
LEAST_LEVEL = 1e-3
"""Lower levels are not compared: 100 times almost nothing is still little."""
TINY_CLIP = 1e-4
PATIENCE = 60.0
"""A silence of so many seconds is not long,"""
STEPS_MISSED = 50
"""nor is one of so many usual steps,"""
PAUSES = 4
"""nor one of so many times the longest pause so far."""
BY_HAND = ("KeyboardInterrupt", "SystemExit")
NOTHING_TO_LEARN = ("no_labels", "zero_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """One thing that is not as it should be."""

    weight: Weight
    text: str


def concerns(record: Record) -> tuple[Concern, ...]:
    """Everything the journal holds against the run, worst first. Pure."""
    found: list[Concern] = []
    for check in CHECKS:
        found += check(record)
    return tuple(sorted(found, key=lambda concern: concern.weight != "unhealthy"))


def silence(record: Record, idle: float) -> Concern | None:
    """A concern if the run is not over and has written nothing for `idle` seconds."""
    if ended(record) is not None:
        return None
    patience = PATIENCE
    known = " and no step was made yet"
    taken = finite_values(record.steps, "seconds")
    if taken:
        usual = median(taken)
        patience = max(patience, STEPS_MISSED * usual, PAUSES * max(taken))
        known = f"; a step usually takes {phrases.number(usual)} s"
    if idle <= patience:
        return None
    text = f"nothing was written for {idle:,.0f} s{known}: it hangs, or was killed"
    return Concern(weight="attention", text=text)


def ended(record: Record) -> dict[str, Any] | None:
    """The last line of a run that was closed."""
    return _last_note(record, "end")


def _last_note(record: Record, kind: str) -> dict[str, Any] | None:
    for line in reversed(record.notes):
        if line.get("type") == kind:
            return dict(line)
    return None


def _no_step(record: Record) -> Iterator[Concern]:
    if not record.steps and ended(record) is not None:
        yield Concern(weight="unhealthy", text="the run ended without a single step")


def _exception(record: Record) -> Iterator[Concern]:
    """The program raised, in a step or outside of one, and nothing came after it."""
    last = record.incidents[-1] if record.incidents else None
    if last is not None and last.verdict.kind == "exception":
        raised_last = not record.steps or record.steps[-1]["step"] <= last.step
        if raised_last:
            what = last.verdict.summary or "an exception"
            text = f"step {last.step} ended with an exception: {what}"
            yield Concern(weight="unhealthy", text=text)
        return
    error = _error_at_the_end(record)
    if error and not error.startswith(BY_HAND):
        text = f"an exception outside of a step ended the run: {error}"
        yield Concern(weight="unhealthy", text=text)


def _error_at_the_end(record: Record) -> str:
    end = ended(record)
    if end is None:
        return ""
    return str(end.get("error") or "")


def _disarmed(record: Record) -> Iterator[Concern]:
    fault = _last_note(record, "fault")
    end = ended(record)
    if fault is not None:
        since = f" since step {fault['step']}" if "step" in fault else ""
        text = f"the guard is disarmed{since}: {fault.get('error', 'it failed')}"
        yield Concern(weight="attention", text=text)
    elif end is not None and end.get("armed") is False:
        text = "the guard was disarmed when the run ended: its last steps are unchecked"
        yield Concern(weight="attention", text=text)


def _dropped(record: Record) -> Iterator[Concern]:
    """Steps were dropped; those of a GradScaler that searches its scale count if it finds none."""
    tail = record.steps[-RECENT:]
    if len(tail) == RECENT and not committed(tail):
        yield Concern(weight="unhealthy", text=f"no step was committed in the last {RECENT}")
        return
    calibrations = calibration_steps(tail, record.incidents)
    dropped = []
    for line in tail:
        dropped.append(not line.get("committed", True) and line["step"] not in calibrations)
    if sum(dropped) > len(tail) // 2:
        text = f"{sum(dropped)} of the last {len(tail)} steps were dropped"
        yield Concern(weight="unhealthy", text=text)
    elif len(tail) >= SEVERAL and all(dropped[-SEVERAL:]):
        yield Concern(weight="unhealthy", text=f"no step was committed in the last {SEVERAL}")


def _not_finite(record: Record) -> Iterator[Concern]:
    """Steps were committed although their loss was not finite."""
    losses = [line["loss"] for line in committed(record.steps) if "loss" in line][-SEVERAL:]
    bad = sum(not phrases.finite(loss) for loss in losses)
    if bad > len(losses) // 2:
        text = f"the loss of {bad} of the last {len(losses)} committed steps is not finite"
        yield Concern(weight="unhealthy", text=text)


def _rate_zero(record: Record) -> Iterator[Concern]:
    tail = [line["lr"] for line in record.steps if line.get("lr")][-SEVERAL:]
    if len(tail) >= FEW and not any(map(_any_rate, tail)):
        text = (
            f"the learning rate is 0 in every group, in the last {len(tail)} steps: nothing is "
            f"learned"
        )
        yield Concern(weight="attention", text=text)


def _any_rate(rates: Any) -> bool:
    """Is the rate of any group above 0? Journals of other loops may hold a single number."""
    return any(rates) if isinstance(rates, list | tuple) else bool(rates)


def _stands_still(record: Record) -> Iterator[Concern]:
    """No gradient, or always the same loss.

    A loss of 0 is left alone: there may be nothing left to learn.
    """
    tail = committed(record.steps)[-2 * MANY :]
    norms = []
    for line in tail[-MANY:]:
        if line.get("grad_norm") is not None and line.get("loss") != 0:
            norms.append(line["grad_norm"])
    losses = [loss for loss in finite_values(tail, "loss") if loss != 0]
    if len(norms) == MANY and not any(norms):
        text = f"every gradient of the last {MANY} steps is 0: nothing is learned"
        yield Concern(weight="attention", text=text)
    elif len(losses) == 2 * MANY and len(set(losses)) == 1:
        same = phrases.number(losses[-1])
        text = (
            f"the loss is {same} to the last bit in the last {len(losses)} steps: nothing is "
            f"learned"
        )
        yield Concern(weight="attention", text=text)


def _clipped_away(record: Record) -> Iterator[Concern]:
    tail = finite_values(record.steps, "clip_factor")[-MANY:]
    if len(tail) == MANY and max(tail) < TINY_CLIP:
        text = (
            f"clipping leaves {phrases.number(max(tail))} of the gradient or less, in the last "
            f"{MANY} steps"
        )
        yield Concern(weight="attention", text=text)


def _nothing_to_learn(record: Record) -> Iterator[Concern]:
    tail = {line["step"] for line in record.steps[-RECENT:]}
    empty = set()
    for line in record.notes:
        if line.get("kind") in NOTHING_TO_LEARN and line.get("step") in tail:
            empty.add(line["step"])
    if len(tail) >= SEVERAL and len(empty) > len(tail) // 2:
        text = (
            f"{len(empty)} of the last {len(tail)} steps had no label, or a loss of 0 without a "
            f"gradient"
        )
        yield Concern(weight="attention", text=text)


def _level(record: Record) -> Iterator[Concern]:
    """The loss has risen, by the medians of equal parts of the run."""
    losses = finite_values(committed(record.steps), "loss")
    blocks = _blocks(losses)
    if len(blocks) < 2:
        return
    levels = list(map(median, blocks))
    numbers = (
        f"it is at {phrases.number(levels[-1])}, began at {phrases.number(losses[0])}, was "
        f"at {phrases.number(min(losses))}"
    )
    began_at = max(abs(losses[0]), _spread(blocks[0]), LEAST_LEVEL)
    if levels[-1] > RUIN * began_at:
        yield Concern(weight="unhealthy", text=f"the loss has run away: {numbers}")
        return
    noise = _noise(blocks, levels)
    # The lower of the last two parts: a single high part may be a hard stretch of the data.
    now = min(levels[-2:])
    best = min(levels[:-1])
    if now - best <= max(ABOVE_NOISE * noise, ORDINARY * _largest_rise_made_good(levels)):
        return
    first_half = levels[: (len(levels) + 1) // 2]
    if now > JUMP * max(LEAST_LEVEL, *map(abs, first_half)):
        yield Concern(weight="unhealthy", text=f"the loss has run away: {numbers}")
        return
    learned = levels[0] - best
    if learned > ABOVE_NOISE * noise and now - best > GONE * learned:
        share = (now - best) / learned
        lost = "all of it" if share >= 1 else f"{share:.0%} of it"
        yield Concern(weight="attention", text=f"what was learned is gone again, {lost}: {numbers}")


def _blocks(losses: Sequence[float]) -> list[Sequence[float]]:
    """Cut the losses into equal parts from the end; what is left over is at the beginning."""
    size = max(FEW, len(losses) // BLOCKS)
    first = len(losses) % size
    return [losses[start : start + size] for start in range(first, len(losses), size)]


def _largest_rise_made_good(levels: Sequence[float]) -> float:
    """The largest rise that the run has mostly made good again: losses of two opponents do that."""
    largest = 0.0
    lowest = levels[0]
    for position, level in enumerate(levels[:-1]):
        rise = level - lowest
        if rise > largest and min(levels[position + 1 :]) <= level - rise * RECOVERED:
            largest = rise
        lowest = min(lowest, level)
    return largest


def _noise(blocks: Sequence[Sequence[float]], levels: Sequence[float]) -> float:
    """How much the loss of this run usually differs between two parts, and within one."""
    # The last quarter is left out: it is what is being judged.
    known = max(2, len(levels) - max(2, len(levels) // 4))
    swings = sorted(abs(after - before) for before, after in pairwise(levels[:known]))
    # The upper quartile: one spike among the parts does not make the run noisy.
    usual = swings[int(0.75 * (len(swings) - 1))] if swings else 0.0
    return max(usual, median(map(_spread, blocks[:known])))


def _spread(losses: Sequence[float]) -> float:
    level = median(losses)
    return median([abs(loss - level) for loss in losses])


CHECKS: tuple[Callable[[Record], Iterator[Concern]], ...] = (
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
