"""One screen of an unfinished run: where it is, how it looks, which stages it has passed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard.report import phrases
from stepguard.report.decision_words import ACTION_WORDS
from stepguard.report.health import Concern, concerns, ended
from stepguard.report.stages import StageOutcome, State
from stepguard.report.step_lines import finite_values
from stepguard.report.summary import Record, RunSummary
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
    record: Record,
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
    told = concerns(record) if told is None else told
    states = set(map(attrgetter("state"), outcomes))
    if _stopped(record):
        return "stopped"
    if "failed" in states:
        return "unhealthy"
    if ended(record) is None and not _enough_seen(record, states, wanted):
        return _worst(told, "waiting") if now else "waiting"
    if "waiting" in states:
        return "unhealthy"
    verdict = _worst(told, "healthy")
    # Where what the user asked for holds, only what is plainly broken counts beside it.
    return "healthy" if outcomes and verdict == "attention" else verdict


def _enough_seen(record: Record, states: set[State], wanted: int | None) -> bool:
    if wanted is None or "waiting" in states:
        return False
    return len(record.steps) >= wanted


def _worst(told: Sequence[Concern], none: Verdict) -> Verdict:
    """The weight of the worst concern, or `none`."""
    weights = {concern.weight for concern in told}
    if "unhealthy" in weights:
        return "unhealthy"
    return "attention" if weights else none


def _stopped(record: Record) -> bool:
    """Did its policy stop the run, and was it not started again since?"""
    if not record.incidents or not record.incidents[-1].stopped:
        return False
    last = record.incidents[-1].step
    return not record.steps or record.steps[-1]["step"] in (last - 1, last)


def screenful(
    record: Record,
    summary: RunSummary,
    outcomes: Sequence[StageOutcome],
    verdict: Verdict,
    told: Sequence[Concern] = (),
) -> RenderableType:
    """Everything, for a `rich.live.Live` or a plain print."""
    parts: list[RenderableType] = [_numbers(record, summary)]
    if outcomes:
        parts.append(_stages(outcomes))
    for outcome in outcomes:
        if outcome.note:
            parts.append(Unbroken(f" {outcome.note}", "yellow"))
    for incident in record.incidents[-LAST_INCIDENTS:]:
        text = f" step {incident.step}: {incident.verdict.summary}"
        if incident.decision is not None:
            text += f", {ACTION_WORDS[incident.decision.action].done}"
        parts.append(Unbroken(text, "red"))
    for concern in told:
        parts.append(Unbroken(f" {concern.text}", WEIGHTS[concern.weight]))
    parts.append(Text(f" {verdict}", style=ENDED[verdict]))
    return Group(*parts)


def _numbers(record: Record, summary: RunSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="cyan", no_wrap=True, min_width=10)
    grid.add_column()
    last = record.steps[-1] if record.steps else {}
    steps = f"{summary.steps:,} seen, {summary.committed:,} committed, {summary.skipped:,} skipped"
    rows = [("step", f"{last.get('step', '-')}  ({steps})")]
    for name in ("loss", "grad_norm"):
        values = finite_values(record.steps[-SHOWN:], name)
        if values:
            rows.append((name, f"{phrases.number(last.get(name))}  {phrases.sparkline(values)}"))
    if last.get("lr"):
        rows.append(("lr", phrases.rates(last["lr"])))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step"))
    rows.append(("incidents", str(len(record.incidents))))
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
