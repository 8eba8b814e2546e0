"""Judge a run by its journal: what speaks against it, and the stages it has passed.

Losses are judged against the run's own noise: they may be negative, huge or swing. A stage such as
`0-500: loss<5, incidents=0` is judged once step 500 has come.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from stepguard._errors import ConfigError
from stepguard.diagnose import engine
from stepguard.judge.history import RUN_AWAY, USUAL, Progress
from stepguard.records.codec import record
from stepguard.report.phrases import number
from stepguard.report.story import Note, Run

Weight = Literal["attention", "unhealthy"]
RECENT = 48
"""Steps that stand for how the run is now."""
SEVERAL = 8
BLOCKS = 24
"""Parts of a run whose middle losses are compared."""
FOLLOWED = "followed/"
PATIENCE = 60.0
"""Seconds of silence that are never long."""


@record
class Concern:
    """One thing that is not as it should be."""

    weight: Weight
    text: str


def concerns(run: Run) -> tuple[Concern, ...]:
    """Everything the story holds against the run, with all its optimizers, worst first. Pure."""
    found = []
    for weight, checks in CHECKS.items():
        for lane in run.lanes:
            whose = f"{lane.name}: " if run.further else ""
            for check in checks:
                found += [Concern(weight=weight, text=whose + text) for text in check(lane)]
    return tuple(found)


def silence(run: Run, idle: float) -> Concern | None:
    """A concern if the run is not over and has written nothing for `idle` seconds."""
    if run.ended:
        return None
    patience = PATIENCE
    known = " and no step was made yet"
    taken = run.steps.values("seconds")
    if len(taken):
        usual = float(np.median(taken))
        # neither 50 usual steps nor 4 times the longest pause so far are long
        patience = max(patience, 50 * usual, 4 * float(taken.max()))
        known = f"; a step usually takes {number(usual)} s"
    if idle <= patience:
        return None
    guess = "it hangs, or was killed"
    if run.attempts and run.attempts[-1].alive:
        guess = f"{_process(run)} is still alive: it hangs, or does something other than training"
    text = f"nothing was written for {idle:,.0f} s{known}: {guess}"
    return Concern(weight="attention", text=text)


def _process(run: Run) -> str:
    process = run.header.get("process")
    return f"process {process.get('pid')}" if isinstance(process, dict) else "its process"


def _last_note(run: Run, type_: str, kind: str | None = None) -> Note | None:
    """The last line of this type, and kind if given, that the last attempt has written."""
    for note in reversed(run.notes):
        is_last = note.type == type_ and note.attempt == len(run.attempts) - 1
        if is_last and kind in (None, note.kind):
            return note
    return None


def is_stopped(run: Run) -> bool:
    """Did its policy stop the run, and was it not started again since?"""
    return any(lane.attempts and lane.attempts[-1].ending == "stopped" for lane in run.lanes)


# --- Checks: each yields sentences about what is wrong.

Check = Callable[[Run], Iterator[str]]
CHECKS: dict[Weight, list[Check]] = {"unhealthy": [], "attention": []}


def _weighs(weight: Weight) -> Callable[[Check], Check]:
    def note(check: Check) -> Check:
        CHECKS[weight].append(check)
        return check

    return note


@_weighs("unhealthy")
def _ended_badly(run: Run) -> Iterator[str]:
    """It made no step, was killed, or the program raised and nothing came after it."""
    attempt = run.attempts[-1] if run.attempts else None
    last = run.incidents[-1].incident if run.incidents else None
    if not len(run.steps) and run.ended:
        yield "the run ended without a single step"
    if attempt is not None and attempt.ending == "killed":
        yield (
            f"{_process(run)} is gone and left no end record: it was killed (out of memory, "
            "kill -9), or its machine went down"
        )
    if last is not None and last.verdict.kind == "exception":
        if run.incidents[-1].at >= len(run.steps):
            what = last.verdict.summary or "an exception"
            yield f"step {last.step} ended with an exception: {what}"
    elif attempt is not None and attempt.error and not is_stopped(run):
        by_hand = attempt.error.startswith(("KeyboardInterrupt", "SystemExit"))
        if not by_hand:
            yield f"an exception outside of a step ended the run: {attempt.error}"


@_weighs("unhealthy")
def _dropped(run: Run) -> Iterator[str]:
    """Steps were dropped; those of a GradScaler that searches its scale count if it finds none."""
    committed = run.steps.committed[-RECENT:]
    dropped = run.steps.dropped[-RECENT:]
    if len(committed) == RECENT and not committed.any():
        yield f"no step was committed in the last {RECENT}"
    elif dropped.sum() > len(dropped) // 2:
        yield f"{dropped.sum()} of the last {len(dropped)} steps were dropped"
    elif len(dropped) >= SEVERAL and dropped[-SEVERAL:].all():
        yield f"no step was committed in the last {SEVERAL}"


@_weighs("unhealthy")
def _not_finite(run: Run) -> Iterator[str]:
    """Steps were committed although their loss was not finite."""
    losses = run.steps.column("loss").where(run.steps.counts).values[-SEVERAL:]
    bad = int((~np.isfinite(losses)).sum())
    if bad > len(losses) // 2:
        yield f"the loss of {bad} of the last {len(losses)} committed steps is not finite"


def _level(run: Run, *, run_away: bool) -> Iterator[str]:
    """The guard found the run diverged; else its loss has risen, by medians of its parts.

    The weights are not in the journal: where the guard has not judged them, a high loss is judged
    by the limits that the guard has (`detect.history.Progress`). A loss that has run away needs no
    confirmation by the weights; one that has lost what was learned does.
    """
    judged = _last_note(run, "note", "diverged")
    if judged is not None and judged.fields.get("diverged"):
        if run_away:
            yield f"the run has diverged: {judged.fields['diverged']}"
        return
    losses = run.steps.values("loss", run.steps.counts)
    # Equal parts from the end; what is left over is at the beginning.
    size = max(4, len(losses) // BLOCKS)
    parts = losses[len(losses) % size :].reshape(-1, size)
    if len(parts) < 2:
        return
    levels = np.median(parts, axis=1)
    # Lower levels are not compared: 100 times almost nothing is still little
    spread = max(float(np.median(np.abs(parts[0] - levels[0]))), 1e-3)
    start = Progress(float(losses[0]), float(levels[0]), spread)
    away = levels[-1] > start.above_start(RUN_AWAY)
    # The lower of the last two parts: a single high part may be a hard stretch of the data.
    now, best = float(levels[-2:].min()), float(levels[:-1].min())
    swings = float(np.median(np.abs(np.diff(levels))))
    progress = Progress(float(levels[0]), best, USUAL * swings)
    numbers = (
        f"it is at {number(float(levels[-1]))}, began at {number(float(losses[0]))}, was at "
        f"{number(float(losses.min()))}"
    )
    if away and run_away:
        yield f"the loss has run away: {numbers}"
    elif not away and not run_away and progress.learned and now > progress.lost_limit:
        share = (now - best) / (levels[0] - best)
        lost = "all of it" if share >= 1 else f"{share:.0%} of it"
        yield f"what was learned is lost again, {lost}: {numbers}"


CHECKS["unhealthy"].append(partial(_level, run_away=True))
CHECKS["attention"].append(partial(_level, run_away=False))


@_weighs("attention")
def _disarmed(run: Run) -> Iterator[str]:
    fault = _last_note(run, "fault")
    end = _last_note(run, "end")
    if fault is not None:
        since = f" since step {fault.step}" if fault.step is not None else ""
        yield f"the guard is disarmed{since}: {fault.text or 'it failed'}"
    elif end is not None and end.fields.get("armed") is False:
        yield "the guard was disarmed when the run ended: its last steps are unchecked"


@_weighs("attention")
def _silent_failures(run: Run) -> Iterator[str]:
    """What the guard has found wrong in healthy steps of the last attempt, each kind once."""
    found: dict[str, str] = {}
    for note in run.notes:
        code = str(note.fields.get("code", ""))
        if code.startswith(engine.SERIES) and note.attempt == len(run.attempts) - 1:
            found.setdefault(code, f"step {note.step}: {note.text}")
    yield from found.values()


@_weighs("attention")
def _exploded(run: Run) -> Iterator[str]:
    """Finite values that are huge: followed ones that jumped, and weights that deep looks saw."""
    for name, series in run.steps.series.items():
        if not name.startswith(FOLLOWED):
            continue
        sizes = np.abs(series.values[series.finite])
        before = np.maximum(np.maximum.accumulate(sizes), 1.0)
        # Times everything before, and times 1: a gate that begins at 0 has not exploded
        jumps = np.flatnonzero(sizes[SEVERAL:] > 1e6 * before[SEVERAL - 1 : -1])
        if len(jumps):
            row = SEVERAL + int(jumps[0])
            step = int(run.steps.step[series.rows[series.finite][row]])
            yield (
                f"{name.removeprefix(FOLLOWED)} exploded: {number(float(sizes[row]))} at step "
                f"{step}, at most {number(float(sizes[:row].max()))} before"
            )
    first: dict[str, tuple[int, float]] = {}
    for look in run.looks:
        for seen in look.parameters:
            first.setdefault(seen.name, (look.step, seen.weight))
    grown = []
    for seen in run.looks[-1].parameters if run.looks else ():
        step, size = first[seen.name]
        # No healthy weight has a root mean square above 1024, unless it began near that
        if seen.trainable and seen.weight > max(2.0**10, 100.0 * size):
            grown.append((seen.weight, seen.name, step, size))
    if grown:
        weight, name, step, size = max(grown)
        several = f"; {len(grown)} parameters" if len(grown) > 1 else ""
        yield (
            f"weights exploded: the root mean square of {name} is {number(weight)} at step "
            f"{run.looks[-1].step}, {number(size)} at step {step}{several}"
        )


# --- Acceptance of a run by stages.


State = Literal["waiting", "passed", "failed"]
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
COUNTS = ("incidents", "skipped")
LEVELS = ("loss", "grad_norm", "clip_factor", "scale", "lr", "seconds")
"""Numbers that a step's line may have, whatever the user names or follows."""


class Stage(NamedTuple):
    """Steps `first` to `last`, and what must hold of them: name, comparison and limit."""

    first: int
    last: int
    conditions: list[tuple[str, str, float]]


@record
class StageOutcome:
    """One condition of one stage, with the number that decided it."""

    stage: str
    condition: str
    state: State
    value: float | None = None
    note: str = ""
    """Why the value is missing although steps were recorded."""


def parse_stage(text: str) -> Stage:
    """`0-500: loss<5, incidents=0`; raises ConfigError with what is wrong."""
    steps, _, conditions = text.partition(":")
    try:
        first, last = map(int, steps.split("-"))
        found = []
        for condition in conditions.split(","):
            name, sign, limit = re.split(r"(<=|>=|<|>|=)", condition)
            found.append((name.strip(), sign, float(limit)))
    except ValueError:
        raise ConfigError(
            f"--stage {text!r} must look like '0-500: loss<5, incidents=0'."
        ) from None
    if last < first:
        raise ConfigError(f"--stage {text!r} ends before it begins; write {last}-{first}.")
    return Stage(first, last, found)


def judge_stages(run: Run, stages: Sequence[Stage]) -> tuple[StageOutcome, ...]:
    """Judge every condition of every stage.

    Counts fail as soon as they are over their limit; levels are read when the stage is over. In a
    run with several optimizers each has to pass.
    """
    outcomes = []
    for lane in run.lanes:
        last = int(lane.steps.step.max()) if len(lane.steps) else -1
        for stage in stages:
            for name, sign, limit in stage.conditions:
                value = _value(lane, stage, name)
                over = last >= stage.last
                state: State = "waiting"
                if over:
                    state = "passed"
                # Counts only grow: one that is above its upper limit stays there.
                lost = name in COUNTS and ">" not in sign and value is not None and value > limit
                if lost or (over and (value is None or not COMPARE[sign](value, limit))):
                    state = "failed"
                steps = f"{stage.first}-{stage.last}"
                if run.further:
                    steps = f"{lane.name} {steps}"
                outcome = StageOutcome(
                    stage=steps,
                    condition=f"{name}{sign}{number(limit)}",
                    state=state,
                    value=value,
                    note=_no_such_value(lane, name, value),
                )
                outcomes.append(outcome)
    return tuple(outcomes)


def _value(run: Run, stage: Stage, name: str) -> float | None:
    """A number of the stage; levels are those of the steps that count."""
    table = run.steps
    inside = (table.step >= stage.first) & (table.step <= stage.last)
    if name == "incidents":
        return float(sum(stage.first <= one.incident.step <= stage.last for one in run.incidents))
    if name == "skipped":
        return float((inside & ~table.committed).sum())
    names = (name, f"loss/{name}", f"followed/{name}")
    series_named = next((series for series in names if series in table.series), "")
    series = table.column(series_named)
    if name == "fall":
        series = table.column("loss")
    elif name == "lr":
        series = table.highest_rate
    series = series.where(inside & table.counts)
    numbers = series.values[series.finite]
    if not len(numbers):
        return None
    # The median of a tenth, which single spikes do not move.
    tenth = max(1, len(numbers) // 10)
    ended = float(np.median(numbers[-tenth:]))
    if name == "fall":
        return float(np.median(numbers[:tenth])) - ended
    return ended


def _no_such_value(run: Run, name: str, value: float | None) -> str:
    """Say that no step has a value of this name; nothing before the first step."""
    known = []
    for series in run.steps.series:
        kind, _, label = series.partition("/")
        if series in LEVELS or (label and kind in ("loss", "followed")):
            known.append(label or series)
    if value is not None or not known or name in known:
        return ""
    names = ", ".join([*known, *COUNTS, "fall"])
    return f"no step of this run has a value named {name!r}; it has {names}"


# --- The verdict.


Verdict = Literal["waiting", "healthy", "attention", "unhealthy", "stopped"]


def _has_steps(run: Run, wanted: int | None) -> bool:
    """Has every optimizer made the wanted steps? No, where nobody said how many."""
    return wanted is not None and all(len(lane.steps) >= wanted for lane in run.lanes)


def judge_run(
    run: Run,
    outcomes: Sequence[StageOutcome],
    wanted: int | None,
    found: Sequence[Concern] | None = None,
    *,
    now: bool = False,
) -> Verdict:
    """Judge a run after `wanted` steps, at its end, or as soon as a stage has failed.

    `found` is what speaks against the run, worst first. With `now` an unfinished run is judged as
    well, if only to its disadvantage: whether it is healthy is not known before its end.
    """
    if is_stopped(run):
        return "stopped"
    states = {outcome.state for outcome in outcomes}
    if "failed" in states:
        return "unhealthy"
    if found is None:
        found = concerns(run)
    worst: Verdict = "healthy"
    for concern in found[:1]:
        worst = concern.weight
    if not run.ended and ("waiting" in states or not _has_steps(run, wanted)):
        return worst if now and worst != "healthy" else "waiting"
    if "waiting" in states:
        return "unhealthy"
    # Where what the user asked for holds, only what is plainly broken counts beside it.
    return "healthy" if outcomes and worst == "attention" else worst
