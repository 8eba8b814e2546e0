"""One screen of an unfinished run: where it is, how it looks, which stages it has passed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard.report import phrases
from stepguard.report.decision_words import done
from stepguard.report.health import Concern, concerns, is_stopped
from stepguard.report.stages import StageOutcome, State
from stepguard.report.story import Run
from stepguard.report.summary import RunSummary
from stepguard.report.unbroken import Unbroken

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
        parts.append(_numbers(lane, of_lane))
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


def _numbers(run: Run, summary: RunSummary) -> RenderableType:
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
