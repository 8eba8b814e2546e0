"""One screen of a run that is going on: where it is, how it looks, which stages it has passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard.report import phrases
from stepguard.report.stages import Outcome
from stepguard.report.summary import Record, RunSummary

Verdict = Literal["waiting", "healthy", "unhealthy", "stopped"]
SHOWN = 48
"""Steps drawn as bars."""
LAST_INCIDENTS = 3
STYLES = {"waiting": "dim", "passed": "green", "failed": "bold red"}
ENDED = {"healthy": "bold green", "unhealthy": "bold red", "stopped": "bold red", "waiting": "dim"}


def judge_run(record: Record, outcomes: Sequence[Outcome], wanted: int | None) -> Verdict:
    """After `wanted` steps, at the end of the run, or as soon as a stage has failed."""
    if any(incident.stopped for incident in record.incidents):
        return "stopped"
    if any(outcome.state == "failed" for outcome in outcomes):
        return "unhealthy"
    over = any(line.get("type") == "end" for line in record.notes)
    if not over and (wanted is None or len(record.steps) < wanted):
        return "waiting"
    undecided = any(outcome.state == "waiting" for outcome in outcomes)
    if undecided and not over:
        return "waiting"
    return "unhealthy" if undecided or (not outcomes and _still_bad(record)) else "healthy"


def _still_bad(record: Record) -> bool:
    """Without stages: most of the last steps were dropped."""
    tail = record.steps[-SHOWN:]
    return bool(tail) and sum(not line.get("committed", True) for line in tail) > len(tail) // 2


def screenful(record: Record, summary: RunSummary, outcomes: Sequence[Outcome], verdict: Verdict) -> RenderableType:
    """Everything, for a `rich.live.Live` or a plain print."""
    parts: list[RenderableType] = [_numbers(record, summary)]
    if outcomes:
        parts.append(_stages(outcomes))
    for incident in record.incidents[-LAST_INCIDENTS:]:
        text = f" step {incident.step}: {incident.verdict.summary}"
        done = f", {phrases.ACTION_DONE.get(incident.decision.action, '')}" if incident.decision else ""
        parts.append(Text(text + done, style="red"))
    parts.append(Text(f" {verdict}", style=ENDED[verdict]))
    return Group(*parts)


def _numbers(record: Record, summary: RunSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="cyan", no_wrap=True, min_width=10)
    grid.add_column(overflow="fold")
    last = record.steps[-1] if record.steps else {}
    steps = f"{summary.steps:,} seen, {summary.committed:,} committed, {summary.skipped:,} skipped"
    rows = [("step", f"{last.get('step', '-')}  ({steps})")]
    for name in ("loss", "grad_norm"):
        values = [line[name] for line in record.steps[-SHOWN:] if phrases.finite(line.get(name))]
        if values:
            rows.append((name, f"{phrases.number(last.get(name))}  {phrases.sparkline(values)}"))
    if last.get("lr"):
        rows.append(("lr", phrases.rates(last["lr"])))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step"))
    rows.append(("incidents", str(len(record.incidents))))
    for name, value in rows:
        grid.add_row(f" {name}", Text(value))
    return grid


def _stages(outcomes: Sequence[Outcome]) -> RenderableType:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in (" stage", "condition", "now", ""):
        table.add_column(heading)
    for outcome in outcomes:
        value = phrases.number(outcome.value)
        table.add_row(f" {outcome.stage}", outcome.condition, value, Text(outcome.state, style=STYLES[outcome.state]))
    return table
