"""Find what in a journal speaks against a run.

Losses are judged against the run's own noise: they may be negative, huge or swing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np

from stepguard.detect.history import RUN_AWAY, Progress
from stepguard.report import phrases
from stepguard.report.story import Floats, Note, Run

Weight = Literal["attention", "unhealthy"]
RECENT = 48
"""Steps that stand for how the run is now."""
FEW = 4
SEVERAL = 8
MANY = 16
BLOCKS = 24
"""Parts of a run whose middle losses are compared."""
ABOVE_NOISE = 4.0
RECOVERED = 0.6
"""A rise was made good if the loss went back by this share of it."""
ORDINARY = 1.25
"""A rise up to so many times one that was made good is ordinary."""
LEAST_LEVEL = 1e-3
"""Lower levels are not compared: 100 times almost nothing is still little."""
TINY_CLIP = 1e-4
FOLLOWED = "followed/"
EXPLODED = 1e6
"""Times everything before, and times 1: a gate that begins at 0 has not exploded."""
HUGE_WEIGHT = 2.0**10
"""Root mean square that no healthy weight shows,"""
WEIGHT_GROWTH = 100.0
"""if it did not begin near it."""
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


def concerns(run: Run) -> tuple[Concern, ...]:
    """Everything the story holds against the run, with all its optimizers, worst first. Pure."""
    found: list[Concern] = []
    for lane in run.lanes:
        whose = f"{lane.name}: " if run.further else ""
        for check in CHECKS:
            found += [replace(one, text=whose + one.text) for one in check(lane)]
    return tuple(sorted(found, key=lambda concern: concern.weight != "unhealthy"))


def silence(run: Run, idle: float) -> Concern | None:
    """A concern if the run is not over and has written nothing for `idle` seconds."""
    if run.ended:
        return None
    patience = PATIENCE
    known = " and no step was made yet"
    taken = run.steps.values("seconds")
    if len(taken):
        usual = float(np.median(taken))
        patience = max(patience, STEPS_MISSED * usual, PAUSES * float(taken.max()))
        known = f"; a step usually takes {phrases.number(usual)} s"
    if idle <= patience:
        return None
    guess = "it hangs, or was killed"
    if run.attempts and run.attempts[-1].alive:
        guess = f"{_process(run)} is there: it hangs, or does something else than training"
    text = f"nothing was written for {idle:,.0f} s{known}: {guess}"
    return Concern(weight="attention", text=text)


def _process(run: Run) -> str:
    process = run.header.get("process")
    return f"process {process.get('pid')}" if isinstance(process, dict) else "its process"


def _killed(run: Run) -> Iterator[Concern]:
    if run.attempts and run.attempts[-1].ending == "killed":
        text = (
            f"{_process(run)} is gone and left no end record: it was killed (out of memory, "
            "kill -9), or its machine went down"
        )
        yield Concern(weight="unhealthy", text=text)


def _last_note(run: Run, type_: str, kind: str | None = None) -> Note | None:
    """The last line of this type, and kind if given, that the last attempt has written."""
    for note in reversed(run.notes):
        is_last = note.type == type_ and note.attempt == len(run.attempts) - 1
        if is_last and kind in (None, note.kind):
            return note
    return None


def _no_step(run: Run) -> Iterator[Concern]:
    if not len(run.steps) and run.ended:
        yield Concern(weight="unhealthy", text="the run ended without a single step")


def _exception(run: Run) -> Iterator[Concern]:
    """The program raised, in a step or outside of one, and nothing came after it."""
    last = run.incidents[-1] if run.incidents else None
    if last is not None and last.incident.verdict.kind == "exception":
        raised_last = last.at >= len(run.steps)
        if raised_last:
            what = last.incident.verdict.summary or "an exception"
            text = f"step {last.incident.step} ended with an exception: {what}"
            yield Concern(weight="unhealthy", text=text)
        return
    error = run.attempts[-1].error if run.attempts else ""
    if error and not error.startswith(BY_HAND) and not is_stopped(run):
        text = f"an exception outside of a step ended the run: {error}"
        yield Concern(weight="unhealthy", text=text)


def is_stopped(run: Run) -> bool:
    """Did its policy stop the run, and was it not started again since?"""
    return any(lane.attempts and lane.attempts[-1].ending == "stopped" for lane in run.lanes)


def _disarmed(run: Run) -> Iterator[Concern]:
    fault = _last_note(run, "fault")
    end = _last_note(run, "end")
    if fault is not None:
        since = f" since step {fault.step}" if fault.step is not None else ""
        text = f"the guard is disarmed{since}: {fault.text or 'it failed'}"
        yield Concern(weight="attention", text=text)
    elif end is not None and end.fields.get("armed") is False:
        text = "the guard was disarmed when the run ended: its last steps are unchecked"
        yield Concern(weight="attention", text=text)


def _dropped(run: Run) -> Iterator[Concern]:
    """Steps were dropped; those of a GradScaler that searches its scale count if it finds none."""
    committed = run.steps.committed[-RECENT:]
    if len(committed) == RECENT and not committed.any():
        yield Concern(weight="unhealthy", text=f"no step was committed in the last {RECENT}")
        return
    dropped = run.steps.dropped[-RECENT:]
    if dropped.sum() > len(dropped) // 2:
        text = f"{dropped.sum()} of the last {len(dropped)} steps were dropped"
        yield Concern(weight="unhealthy", text=text)
    elif len(dropped) >= SEVERAL and dropped[-SEVERAL:].all():
        yield Concern(weight="unhealthy", text=f"no step was committed in the last {SEVERAL}")


def _not_finite(run: Run) -> Iterator[Concern]:
    """Steps were committed although their loss was not finite."""
    losses = run.steps.column("loss").where(run.steps.counts).values[-SEVERAL:]
    bad = int((~np.isfinite(losses)).sum())
    if bad > len(losses) // 2:
        text = f"the loss of {bad} of the last {len(losses)} committed steps is not finite"
        yield Concern(weight="unhealthy", text=text)


def _rate_zero(run: Run) -> Iterator[Concern]:
    rates: dict[int, float] = {}
    for name, series in run.steps.series.items():
        if name != "lr" and not name.startswith("lr/"):
            continue
        recent = zip(series.rows[-SEVERAL:].tolist(), series.values[-SEVERAL:], strict=True)
        for row, rate in recent:
            rates[row] = max(rates.get(row, 0.0), abs(float(rate)))
    tail = [rates[row] for row in sorted(rates)][-SEVERAL:]
    if len(tail) >= FEW and not any(tail):
        text = (
            f"the learning rate is 0 in every group, in the last {len(tail)} steps: nothing is "
            f"learned"
        )
        yield Concern(weight="attention", text=text)


def _stands_still(run: Run) -> Iterator[Concern]:
    """No gradient, or always the same loss.

    A loss of 0 is left alone: there may be nothing left to learn.
    """
    table = run.steps
    losses = table.column("loss").where(table.counts)
    tail = np.flatnonzero(table.counts)[-MANY:]
    nothing_left = losses.rows[losses.values == 0]
    norms = table.column("grad_norm")
    judged = norms.values[np.isin(norms.rows, np.setdiff1d(tail, nothing_left))]
    same = losses.values[losses.finite & (losses.values != 0)][-2 * MANY :]
    if len(judged) == MANY and not judged.any():
        text = f"every gradient of the last {MANY} steps is 0: nothing is learned"
        yield Concern(weight="attention", text=text)
    elif len(same) == 2 * MANY and (same == same[0]).all():
        text = (
            f"the loss is {phrases.number(float(same[-1]))} to the last bit in the last "
            f"{len(same)} steps: nothing is learned"
        )
        yield Concern(weight="attention", text=text)


def _clipped_away(run: Run) -> Iterator[Concern]:
    tail = run.steps.values("clip_factor")[-MANY:]
    if len(tail) == MANY and tail.max() < TINY_CLIP:
        text = (
            f"clipping leaves {phrases.number(float(tail.max()))} of the gradient or less, in the "
            f"last {MANY} steps"
        )
        yield Concern(weight="attention", text=text)


def _nothing_to_learn(run: Run) -> Iterator[Concern]:
    seen = len(run.steps.step[-RECENT:])
    first = len(run.steps) - seen
    empty = {note.at for note in run.notes if note.kind in NOTHING_TO_LEARN and note.at >= first}
    if seen >= SEVERAL and len(empty) > seen // 2:
        text = (
            f"{len(empty)} of the last {seen} steps had no label, or a loss of 0 without a gradient"
        )
        yield Concern(weight="attention", text=text)


def _exploded(run: Run) -> Iterator[Concern]:
    """Finite values that are huge: followed ones that jumped, and weights that deep looks saw."""
    for name, series in run.steps.series.items():
        if not name.startswith(FOLLOWED):
            continue
        sizes = np.abs(series.values[series.finite])
        before = np.maximum(np.maximum.accumulate(sizes), 1.0)
        jumps = np.flatnonzero(sizes[SEVERAL:] > EXPLODED * before[SEVERAL - 1 : -1])
        if len(jumps):
            row = SEVERAL + int(jumps[0])
            step = int(run.steps.step[series.rows[series.finite][row]])
            text = (
                f"{name.removeprefix(FOLLOWED)} exploded: {phrases.number(float(sizes[row]))} at "
                f"step {step}, at most {phrases.number(float(sizes[:row].max()))} before"
            )
            yield Concern(weight="attention", text=text)
    first: dict[str, tuple[int, float]] = {}
    for look in run.looks:
        for seen in look.parameters:
            first.setdefault(seen.name, (look.step, seen.weight))
    grown = []
    for seen in run.looks[-1].parameters if run.looks else ():
        step, size = first[seen.name]
        if seen.trainable and seen.weight > max(HUGE_WEIGHT, WEIGHT_GROWTH * size):
            grown.append((seen.weight, seen.name, step, size))
    if grown:
        weight, name, step, size = max(grown)
        text = (
            f"weights exploded: the root mean square of {name} is {phrases.number(weight)} at step "
            f"{run.looks[-1].step}, {phrases.number(size)} at step {step}"
        )
        if len(grown) > 1:
            text += f"; {len(grown)} parameters"
        yield Concern(weight="attention", text=text)


def _level(run: Run) -> Iterator[Concern]:
    """The guard found the run diverged; else its loss has risen, by medians of its parts.

    The weights are not in the journal: where the guard has not judged them, a high loss is judged
    by the limits that the guard has (`detect.history.Progress`).
    """
    judged = _last_note(run, "note", "diverged")
    if judged is not None and judged.fields.get("diverged"):
        yield Concern(weight="unhealthy", text=f"the run has diverged: {judged.fields['diverged']}")
        return
    losses = run.steps.values("loss", run.steps.counts)
    blocks = _blocks(losses)
    if len(blocks) < 2:
        return
    levels = [float(np.median(block)) for block in blocks]
    numbers = (
        f"it is at {phrases.number(levels[-1])}, began at {phrases.number(float(losses[0]))}, was "
        f"at {phrases.number(float(losses.min()))}"
    )
    noise = max(_spread(blocks[0]), LEAST_LEVEL)
    if levels[-1] > Progress(float(losses[0]), levels[0], noise).above_start(RUN_AWAY):
        yield Concern(weight="unhealthy", text=f"the loss has run away: {numbers}")
        return
    noise = _noise(blocks, levels)
    # The lower of the last two parts: a single high part may be a hard stretch of the data.
    now = min(levels[-2:])
    best = min(levels[:-1])
    if now - best <= max(ABOVE_NOISE * noise, ORDINARY * _largest_rise_made_good(levels)):
        return
    progress = Progress(levels[0], best, median(map(_spread, blocks)))
    if progress.learned and now > progress.lost_limit:
        share = (now - best) / (levels[0] - best)
        lost = "all of it" if share >= 1 else f"{share:.0%} of it"
        yield Concern(weight="attention", text=f"what was learned is gone again, {lost}: {numbers}")


def _blocks(losses: Floats) -> list[Floats]:
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


def _noise(blocks: Sequence[Floats], levels: Sequence[float]) -> float:
    """How much the loss of this run usually differs between two parts, and within one."""
    # The last quarter is left out: it is what is being judged.
    known = max(2, len(levels) - max(2, len(levels) // 4))
    swings = sorted(abs(after - before) for before, after in pairwise(levels[:known]))
    # The upper quartile: one spike among the parts does not make the run noisy.
    usual = swings[int(0.75 * (len(swings) - 1))] if swings else 0.0
    return max(usual, median(map(_spread, blocks[:known])))


def _spread(losses: Floats) -> float:
    return float(np.median(np.abs(losses - np.median(losses))))


CHECKS: tuple[Callable[[Run], Iterator[Concern]], ...] = (
    _no_step,
    _killed,
    _exception,
    _dropped,
    _not_finite,
    _level,
    _disarmed,
    _rate_zero,
    _stands_still,
    _clipped_away,
    _nothing_to_learn,
    _exploded,
)
