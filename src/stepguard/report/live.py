"""Follow an unfinished run: one screen of where it is, and the stages it has passed.

A stage such as `0-500: loss<5, incidents=0` is judged once step 500 has come.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard._errors import ConfigError
from stepguard.report import phrases
from stepguard.report.health import Concern, concerns, is_stopped
from stepguard.report.screen import Unbroken
from stepguard.report.story import Run
from stepguard.report.summary import RunSummary

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
                    condition=f"{name}{sign}{phrases.number(limit)}",
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
    chosen = inside & table.counts
    names = (name, f"loss/{name}", f"followed/{name}")
    series_named = next((series for series in names if series in run.steps.series), "")
    numbers = table.values(series_named, chosen)
    if name == "fall":
        numbers = table.values("loss", chosen)
    elif name == "lr":
        # The highest of the parameter groups.
        highest = np.full(len(table), -np.inf)
        for series in table.series.values():
            if series.name.partition("/")[0] == "lr":
                np.maximum.at(highest, series.rows, series.values)
        numbers = highest[chosen & np.isfinite(highest)]
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


# --- One screen of an unfinished run: where it is, how it does, which stages it has passed.


Verdict = Literal["waiting", "healthy", "attention", "unhealthy", "stopped"]
SHOWN = 48
"""Steps drawn as bars."""
LAST_INCIDENTS = 3
STYLES = {
    "waiting": "dim",
    "passed": "green",
    "failed": "bold red",
    "healthy": "bold green",
    "attention": "bold yellow",
    "unhealthy": "bold red",
    "stopped": "bold red",
}
CONCERN_STYLES = {"attention": "yellow", "unhealthy": "bold red"}


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
    if is_stopped(run):
        return "stopped"
    states = {outcome.state for outcome in outcomes}
    if "failed" in states:
        return "unhealthy"
    worst = _worst(concerns(run) if told is None else told)
    fewest = min(len(lane.steps) for lane in run.lanes)
    if not run.ended and ("waiting" in states or wanted is None or fewest < wanted):
        return worst if now and worst != "healthy" else "waiting"
    if "waiting" in states:
        return "unhealthy"
    # Where what the user asked for holds, only what is plainly broken counts beside it.
    return "healthy" if outcomes and worst == "attention" else worst


def _worst(told: Sequence[Concern]) -> Verdict:
    weights = {concern.weight for concern in told}
    if "unhealthy" in weights:
        return "unhealthy"
    return "attention" if weights else "healthy"


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
        parts.append(_numbers(lane, of_lane))
    if outcomes:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
        for heading in (" stage", "condition", "now", ""):
            table.add_column(heading)
        for outcome in outcomes:
            state = Text(outcome.state, style=STYLES[outcome.state])
            value = phrases.number(outcome.value)
            table.add_row(f" {outcome.stage}", Unbroken(outcome.condition), value, state)
        parts.append(table)
    for outcome in outcomes:
        if outcome.note:
            parts.append(Unbroken(f" {outcome.note}", "yellow"))
    for lane in run.lanes:
        for one in lane.incidents[-LAST_INCIDENTS:]:
            incident = one.incident
            whose = f"{lane.name}, " if run.further else ""
            text = f" {whose}step {incident.step}: {incident.verdict.summary}"
            if incident.decision is not None:
                text += f", {phrases.done(incident.decision)}"
            parts.append(Unbroken(text, "red"))
    for concern in told:
        parts.append(Unbroken(f" {concern.text}", CONCERN_STYLES[concern.weight]))
    parts.append(Text(f" {verdict}", style=STYLES[verdict]))
    return Group(*parts)


def _numbers(run: Run, summary: RunSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="cyan", no_wrap=True, min_width=10)
    grid.add_column()
    table = run.steps
    seen = f"{summary.steps:,} seen, {summary.committed:,} committed, {summary.skipped:,} skipped"
    if summary.left:
        seen += f", {summary.left:,} left behind"
    rows = {"step": f"-  ({seen})"}
    if run.last_step is not None:
        rows["step"] = f"{run.last_step}  ({seen})"
    recent = np.zeros(len(table), np.bool_)
    recent[-SHOWN:] = True
    for name in ("loss", "grad_norm"):
        values = table.column(name).where(recent).values
        if np.isfinite(values).any():
            bars = phrases.sparkline(values.tolist())
            rows[name] = f"{phrases.number(table.last(name))}  {bars}"
    if table.last_rates:
        rows["lr"] = phrases.rates(table.last_rates)
    if summary.seconds_per_step is not None:
        rows["speed"] = f"{phrases.number(summary.seconds_per_step)} s a step"
    rows["incidents"] = str(len(run.incidents))
    for name, value in rows.items():
        grid.add_row(f" {name}", Unbroken(value))
    return grid
