"""Acceptance of a run by stages: `0-500: loss<5, incidents=0` is asked once step 500 has come."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard._errors import ConfigError
from stepguard.report import phrases
from stepguard.report.health import Concern, concerns, is_stopped
from stepguard.report.phrases import done
from stepguard.report.screen import Unbroken
from stepguard.report.story import Bools, Run, StepTable
from stepguard.report.summary import RunSummary

# --- Acceptance of a run by stages: `0-500: loss<5, incidents=0` is asked once step 500 has come.


State = Literal["waiting", "passed", "failed"]
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
EXAMPLE = "'0-500: loss<5, incidents=0'"
_CONDITION = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(<=|>=|<|>|=)\s*([-+.\deE]+)\s*")
_STAGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*:(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A number of the run and its limit."""

    name: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{phrases.number(self.limit)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps `first` to `last`, and what must hold of them."""

    first: int
    last: int
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """One condition of one stage, with the number that decided it."""

    stage: str
    condition: str
    state: State
    value: float | None = None
    note: str = ""
    """Why there is no number, where steps have come and none of them has it."""


def parse_stage(text: str) -> Stage:
    """`0-500: loss<5, incidents=0`; raises ConfigError with what is wrong."""
    found = _STAGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--stage {text!r} must look like {EXAMPLE}.")
    first = int(found[1])
    last = int(found[2])
    if last < first:
        raise ConfigError(f"--stage {text!r} ends before it begins; write {last}-{first}.")
    conditions = tuple(_condition(part, text) for part in found[3].split(","))
    return Stage(first=first, last=last, conditions=conditions)


def _condition(part: str, text: str) -> Condition:
    found = _CONDITION.fullmatch(part)
    try:
        limit = float(found[3]) if found else None
    except ValueError:
        limit = None
    if found is None or limit is None:
        raise ConfigError(
            f"--stage {text!r}: {part.strip()!r} is not a condition; write one like {EXAMPLE}."
        )
    return Condition(name=found[1], sign=found[2], limit=limit)


def judge_stages(run: Run, stages: Sequence[Stage]) -> tuple[StageOutcome, ...]:
    """Judge every condition of every stage.

    Counts fail as soon as they are over their limit; levels are read when the stage is over. In a
    run with several optimizers each has to pass.
    """
    outcomes = []
    for lane in run.lanes:
        last = int(lane.steps.step.max()) if len(lane.steps) else -1
        for stage in stages:
            for condition in stage.conditions:
                outcome = _outcome(lane, stage, condition, last)
                whose = f"{lane.name} {stage}" if run.further else str(stage)
                outcomes.append(replace(outcome, stage=whose))
    return tuple(outcomes)


def _outcome(run: Run, stage: Stage, condition: Condition, last: int) -> StageOutcome:
    value = _value(run, stage, condition.name)
    state: State = "waiting"
    if last >= stage.last:
        state = "passed" if _holds(condition, value) else "failed"
    elif _lost_already(condition, value):
        state = "failed"
    note = _no_such_value(run.steps, condition.name) if value is None else ""
    return StageOutcome(
        stage=str(stage), condition=str(condition), state=state, value=value, note=note
    )


def _holds(condition: Condition, value: float | None) -> bool:
    return value is not None and COMPARE[condition.sign](value, condition.limit)


def _lost_already(condition: Condition, value: float | None) -> bool:
    """Counts only grow: one that is above its upper limit stays there."""
    if value is None or condition.name not in COUNTS or condition.sign in (">", ">="):
        return False
    return value > condition.limit


def _no_such_value(table: StepTable, name: str) -> str:
    """Say that no step has a value of this name; nothing before the first step."""
    known = list(map(_own_name, filter(_can_be_asked, table.series)))
    if not known or name in known:
        return ""
    names = ", ".join([*known, *COUNTS, "fall"])
    return f"no step of this run has a value named {name!r}; it has {names}"


def _own_name(series: str) -> str:
    """Components and followed values go by the names the user gave them."""
    for prefix in PREFIXES:
        series = series.removeprefix(prefix)
    return series


def _can_be_asked(series: str) -> bool:
    return series in LEVELS or series.startswith(PREFIXES)


COUNTS = ("incidents", "skipped")
LEVELS = ("loss", "grad_norm", "clip_factor", "scale", "lr", "seconds")
"""Numbers that a step's line may have, whatever the user names or follows."""
PREFIXES = ("loss/", "followed/")


def _value(run: Run, stage: Stage, name: str) -> float | None:
    """A number of the stage; levels are those of the steps that count."""
    if name == "incidents":
        steps = [one.incident.step for one in run.incidents]
        return float(sum(stage.first <= step <= stage.last for step in steps))
    table = run.steps
    inside: Bools = (table.step >= stage.first) & (table.step <= stage.last)
    if name == "skipped":
        return float((inside & ~table.committed).sum())
    if name == "fall":
        return _fall(_numbers(table, inside, "loss"))
    return _level(_numbers(table, inside, name))


def _fall(losses: Sequence[float]) -> float | None:
    """How far the loss came down: its level in the stage's first tenth less that in its last."""
    if not len(losses):
        return None
    tenth = max(1, len(losses) // 10)
    return float(np.median(losses[:tenth]) - np.median(losses[-tenth:]))


def _level(numbers: Sequence[float]) -> float | None:
    """Where a stage ended: the median of its last tenth, which single spikes do not move."""
    if not len(numbers):
        return None
    tenth = max(1, len(numbers) // 10)
    return float(np.median(numbers[-tenth:]))


def _numbers(table: StepTable, inside: Bools, name: str) -> list[float]:
    mask: Bools = inside & table.counts
    if name == "lr":
        return _highest_rates(table, mask)
    for candidate in (name, *(prefix + name for prefix in PREFIXES)):
        if candidate in table.series:
            return list(map(float, table.values(candidate, mask)))
    return []


def _highest_rates(table: StepTable, mask: Bools) -> list[float]:
    """`lr` has one value for each parameter group."""
    highest = np.full(len(table), -np.inf)
    for name, series in table.series.items():
        if name == "lr" or name.startswith("lr/"):
            np.maximum.at(highest, series.rows, series.values)
    chosen = highest[mask]
    return list(map(float, chosen[np.isfinite(chosen)]))


# --- One screen of an unfinished run: where it is, how it looks, which stages it has passed.


Verdict = Literal["waiting", "healthy", "attention", "unhealthy", "stopped"]
SHOWN = 48
"""Steps drawn as bars."""
LAST_INCIDENTS = 3
STYLES = {"waiting": "dim", "passed": "green", "failed": "bold red"}
ENDED = {
    "healthy": "bold green",
    "attention": "bold yellow",
    "unhealthy": "bold red",
    "stopped": "bold red",
    "waiting": "dim",
}
WEIGHTS = {"attention": "yellow", "unhealthy": "bold red"}


def judge_run(
    run: Run,
    outcomes: Sequence[StageOutcome],
    wanted: int | None,
    told: Sequence[Concern] | None = None,
    *,
    now: bool = False,
) -> Verdict:
    """Judge a run after `wanted` steps, at its end, or as soon as a stage has failed.

    `told` is what `health` holds against the run. With `now` an unfinished run is judged as well,
    if only to its disadvantage: whether it is healthy is not known before its end.
    """
    told = concerns(run) if told is None else told
    states = set(map(attrgetter("state"), outcomes))
    if is_stopped(run):
        return "stopped"
    if "failed" in states:
        return "unhealthy"
    if not run.ended and not _enough_seen(run, states, wanted):
        return _worst(told, "waiting") if now else "waiting"
    if "waiting" in states:
        return "unhealthy"
    verdict = _worst(told, "healthy")
    # Where what the user asked for holds, only what is plainly broken counts beside it.
    return "healthy" if outcomes and verdict == "attention" else verdict


def _enough_seen(run: Run, states: set[State], wanted: int | None) -> bool:
    if wanted is None or "waiting" in states:
        return False
    return all(len(lane.steps) >= wanted for lane in run.lanes)


def _worst(told: Sequence[Concern], none: Verdict) -> Verdict:
    """The weight of the worst concern, or `none`."""
    weights = {concern.weight for concern in told}
    if "unhealthy" in weights:
        return "unhealthy"
    return "attention" if weights else none


def screenful(
    run: Run,
    summary: RunSummary,
    outcomes: Sequence[StageOutcome],
    verdict: Verdict,
    told: Sequence[Concern] = (),
) -> RenderableType:
    """Everything, for a `rich.live.Live` or a plain print."""
    parts: list[RenderableType] = []
    for lane, of_lane in zip(run.lanes, summary.optimizers or (summary,), strict=True):
        if run.further:
            parts.append(Text(f" {lane.name}", style="bold"))
        parts.append(_live_view_numbers(lane, of_lane))
    if outcomes:
        parts.append(_stages(outcomes))
    for outcome in outcomes:
        if outcome.note:
            parts.append(Unbroken(f" {outcome.note}", "yellow"))
    for lane in run.lanes:
        for one in lane.incidents[-LAST_INCIDENTS:]:
            incident = one.incident
            whose = f"{lane.name}, " if run.further else ""
            text = f" {whose}step {incident.step}: {incident.verdict.summary}"
            if incident.decision is not None:
                text += f", {done(incident.decision)}"
            parts.append(Unbroken(text, "red"))
    for concern in told:
        parts.append(Unbroken(f" {concern.text}", WEIGHTS[concern.weight]))
    parts.append(Text(f" {verdict}", style=ENDED[verdict]))
    return Group(*parts)


def _live_view_numbers(run: Run, summary: RunSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="cyan", no_wrap=True, min_width=10)
    grid.add_column()
    table = run.steps
    seen = f"{summary.steps:,} seen, {summary.committed:,} committed, {summary.skipped:,} skipped"
    if summary.left:
        seen += f", {summary.left:,} left behind"
    now = "-" if run.last_step is None else run.last_step
    rows = [("step", f"{now}  ({seen})")]
    recent = np.zeros(len(table), np.bool_)
    recent[-SHOWN:] = True
    for name in ("loss", "grad_norm"):
        values = table.column(name).where(recent).values
        if np.isfinite(values).any():
            bars = phrases.sparkline(values.tolist())
            rows.append((name, f"{phrases.number(table.last(name))}  {bars}"))
    rates = table.rates(len(table) - 1)
    if rates:
        rows.append(("lr", phrases.rates(rates)))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step"))
    rows.append(("incidents", str(len(run.incidents))))
    for name, value in rows:
        grid.add_row(f" {name}", Unbroken(value))
    return grid


def _stages(outcomes: Sequence[StageOutcome]) -> RenderableType:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in (" stage", "condition", "now", ""):
        table.add_column(heading)
    for outcome in outcomes:
        value = phrases.number(outcome.value)
        table.add_row(
            f" {outcome.stage}",
            Unbroken(outcome.condition),
            value,
            Text(outcome.state, style=STYLES[outcome.state]),
        )
    return table
