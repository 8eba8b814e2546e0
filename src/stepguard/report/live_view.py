"""One screen of a run that is going on: where it is, how it looks, which stages it has passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard.report import phrases
from stepguard.report.health import Concern, concerns
from stepguard.report.stages import Outcome
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
    outcomes: Sequence[Outcome],
    wanted: int | None,
    told: Sequence[Concern] | None = None,
    *,
    now: bool = False,
) -> Verdict:
    """After `wanted` steps, at the end of the run, or as soon as a stage has failed.

    `told` is what `health` holds against the run. With `now` a run that goes on is judged as well,
    if only to its disadvantage: whether it is healthy is not known before.
    """
    told = concerns(record) if told is None else told
    if _stopped(record):
        return "stopped"
    if any(outcome.state == "failed" for outcome in outcomes):
        return "unhealthy"
    over = any(line.get("type") == "end" for line in record.notes)
    undecided = any(outcome.state == "waiting" for outcome in outcomes)
    enough = wanted is not None and len(record.steps) >= wanted
    if not over and (undecided or not enough):
        return _worst(told) if now and told else "waiting"
    if undecided:
        return "unhealthy"
    if outcomes:  # what the user asked for holds; only what is plainly broken counts beside it
        told = [concern for concern in told if concern.weight == "unhealthy"]
    return _worst(told) if told else "healthy"


def _worst(told: Sequence[Concern]) -> Verdict:
    return "unhealthy" if any(concern.weight == "unhealthy" for concern in told) else "attention"


def _stopped(record: Record) -> bool:
    """By its policy, and not started again since."""
    last = record.incidents[-1] if record.incidents else None
    if last is None or not last.stopped:
        return False
    return not record.steps or record.steps[-1]["step"] in (last.step - 1, last.step)


def screenful(
    record: Record,
    summary: RunSummary,
    outcomes: Sequence[Outcome],
    verdict: Verdict,
    told: Sequence[Concern] = (),
) -> RenderableType:
    """Everything, for a `rich.live.Live` or a plain print."""
    parts: list[RenderableType] = [_numbers(record, summary)]
    if outcomes:
        parts.append(_stages(outcomes))
        parts.extend(Unbroken(f" {outcome.note}", "yellow") for outcome in outcomes if outcome.note)
    for incident in record.incidents[-LAST_INCIDENTS:]:
        text = f" step {incident.step}: {incident.verdict.summary}"
        done = (
            f", {phrases.ACTION_DONE.get(incident.decision.action, '')}"
            if incident.decision
            else ""
        )
        parts.append(Unbroken(text + done, "red"))
    parts.extend(Unbroken(f" {concern.text}", WEIGHTS[concern.weight]) for concern in told)
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
        values = [line[name] for line in record.steps[-SHOWN:] if phrases.finite(line.get(name))]
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


def _stages(outcomes: Sequence[Outcome]) -> RenderableType:
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
