"""A run's summary as Markdown, to paste into an issue or a lab book."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepguard.records.text import as_markdown, one_line
from stepguard.report import phrases
from stepguard.report.run_words import (
    chains,
    counts,
    further_commands,
    heading,
    kind_title,
    lead_up,
    shorten,
    where_and_who,
)
from stepguard.report.summary import IncidentGroup, RunSummary
from stepguard.report.timeline import Event

_COLUMNS = (
    "#",
    "kind",
    "first step",
    "last step",
    "count",
    "in a row",
    "where",
    "cause",
    "done",
    "lr",
)


def render_markdown(summary: RunSummary) -> str:
    """The whole page."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: RunSummary) -> Iterator[str]:
    yield from (f"# stepguard report: {_code(summary.journal)}", "")
    yield from _table(("", ""), [*heading(summary), *counts(summary)])
    if summary.torn:
        yield ""
        yield f"> Warning: {phrases.count(summary.torn, 'line')} of the journal could not be read."
    if summary.groups:
        yield from ("", "## Incidents by kind", "")
        rows = [_row(position, group) for position, group in enumerate(summary.groups, start=1)]
        yield from _table(_COLUMNS, rows)
        for position, group in enumerate(summary.groups, start=1):
            yield from _details(position, group)
    led = lead_up(summary)
    if led:
        yield from ("", "## Before the first incident", "", "```")
        for name, value in led:
            yield one_line(f"{name:<10} {value}").replace("`", "'")
        yield "```"
    for title, events in chains(summary):
        yield from ("", f"## {title[:1].upper()}{title[1:]}", "")
        yield from _chain(events)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(as_markdown(value) for value in row)} |"


def _row(position: int, group: IncidentGroup) -> tuple[str, ...]:
    return (
        str(position),
        kind_title(group),
        str(group.first_step),
        str(group.last_step),
        str(group.count),
        str(group.consecutive),
        where_and_who(group),
        f"{group.code} {group.title}".strip(),
        group.done,
        phrases.rates(group.lr, group.schedule),
    )


def _details(position: int, group: IncidentGroup) -> Iterator[str]:
    yield ""
    summary = group.summary or phrases.verdict_title(group.verdict)
    yield f"{position}. {as_markdown(summary)}"
    for sentence in group.evidence:
        yield f"   - {as_markdown(sentence)}"
    for command in further_commands(group):
        yield f"   - {_code(command)}"


def _code(text: object) -> str:
    inside = one_line(str(text)).replace("`", "'")
    return f"`{inside}`"


def _chain(chain: Sequence[Event]) -> Iterator[str]:
    events, left_out = shorten(chain)
    for position, event in enumerate(events, start=1):
        if left_out and position == len(events) // 2 + 1:
            yield f"   ({phrases.count(left_out, 'event')} left out)"
        yield f"{position}. **{as_markdown(event.steps)}**: {as_markdown(event.text)}"
