"""A run's summary for a terminal: counts, incidents by kind, what led to them, events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepguard.report import phrases, screen
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
from stepguard.report.unbroken import Unbroken, titled

STYLES = {"info": "", "note": "yellow", "incident": "bold red", "good": "green"}


def render_terminal(
    summary: RunSummary, *, width: int = 100, colour: bool = False, unicode: bool = True
) -> str:
    """The whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    paint_summary(console, summary, unicode=unicode)
    return screen.text_on(console)


def paint_summary(console: Console, summary: RunSummary, *, unicode: bool = True) -> None:
    """Print the summary; parts without data are left out."""
    _title(console, f"stepguard report: {summary.journal}", unicode)
    console.print(_pairs([*heading(summary), *counts(summary)]))
    if summary.torn:
        torn = (
            f"{phrases.count(summary.torn, 'line')} of the journal could not be read: a crash "
            f"while writing"
        )
        console.print(Text(f" warning: {torn}", style="bold yellow"))
    if summary.groups:
        _title(console, "incidents by kind", unicode)
        console.print(_table(summary.groups))
        for position, group in enumerate(summary.groups, start=1):
            _details(console, position, group)
    led = lead_up(summary, plain=not unicode)
    if led:
        _title(console, "before the first incident", unicode)
        console.print(_pairs(led))
    for title, events in chains(summary):
        _title(console, title, unicode)
        console.print(_chain(events, unicode))


def _title(console: Console, text: str, unicode: bool) -> None:
    console.print(titled(text, width=console.width, unicode=unicode))


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan", min_width=6)
    grid.add_column()
    for name, value in rows:
        grid.add_row(f" {name}", Unbroken(value))
    return grid


def _table(groups: Sequence[IncidentGroup]) -> RenderableType:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(" #", justify="right")
    table.add_column("kind")
    for name in ("first", "last", "count", "in a row"):
        table.add_column(name, justify="right", no_wrap=True)
    for position, group in enumerate(groups, start=1):
        kind = Text(kind_title(group), style="bold red")
        numbers = (group.first_step, group.last_step, group.count, group.consecutive)
        table.add_row(f" {position}", kind, *map(str, numbers))
    return table


def _details(console: Console, position: int, group: IncidentGroup) -> None:
    console.print()
    title = Table.grid(padding=(0, 1, 0, 0))
    title.add_row(
        Text(f" {position}.", style="dim"),
        Unbroken(group.summary or phrases.verdict_title(group.verdict)),
    )
    console.print(title)
    rows = [("where", where_and_who(group)), ("cause", _cause(group))]
    for sentence in group.evidence:
        rows.append(("", f"- {sentence}"))
    rows += [("done", group.done), ("lr", phrases.rates(group.lr, group.schedule))]
    console.print(Padding(_pairs([row for row in rows if row[1]]), (0, 0, 0, 3)))
    for command in further_commands(group):
        # Not in the table: a long path must stay on one line to be copied.
        console.print(Text.assemble(("    next   ", "cyan"), (command, "bold")), soft_wrap=True)


def _cause(group: IncidentGroup) -> str:
    cause = f"{group.code} {group.title}".strip()
    if group.code and group.certainty:
        cause += f" ({group.certainty})"
    return cause


def _chain(events: Sequence[Event], unicode: bool) -> RenderableType:
    shown, left_out = shorten(events)
    first = "•" if unicode else "*"
    then = "↓" if unicode else "v"
    chain = Table.grid(padding=(0, 2, 0, 0))
    chain.add_column(no_wrap=True, style="dim")
    chain.add_column(no_wrap=True, style="dim")
    chain.add_column()
    for position, event in enumerate(shown):
        if left_out and position == len(shown) // 2:
            missing = f"{phrases.count(left_out, 'event')} left out"
            chain.add_row("", then, Text(missing, style="dim"))
        mark = then if position else first
        chain.add_row(f" {event.steps}", mark, Unbroken(event.text, STYLES[event.weight]))
    return chain
