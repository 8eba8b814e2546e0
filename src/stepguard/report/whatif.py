"""Show what would have helped: a table of the candidates, the best first, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stepguard.records.whatif import TrialOutcome, WhatIf
from stepguard.report import phrases
from stepguard.report._random import same_random_numbers
from stepguard.report.screen import CleanConsole, draw, is_tty, put, takes_unicode

MOST_POINTS = 16
"""Losses of a trial that are drawn, the last ones."""
MUCH = 10.0
Told = Callable[[int, int, str], None]


def show(found: WhatIf, stream: TextIO) -> None:
    """Print the table."""
    plain = not takes_unicode(stream)
    put(draw(stream, lambda console: paint(found, console, plain=plain)), stream)


def paint(found: WhatIf, console: Console, *, plain: bool = False) -> None:
    """Draw the table, the best candidate in words, and what to know about the trials."""
    console.print(Text(_heading(found)))
    console.print()
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("what if", overflow="fold")
    table.add_column("bad value", overflow="fold")
    for heading in ("loss", "held out", "weights moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("losses", no_wrap=True)
    for outcome in found.outcomes:
        table.add_row(*_row(outcome, plain=plain))
    console.print(table)
    console.print()
    for sentence in sentences(found):
        console.print(Text(sentence))


def _heading(found: WhatIf) -> str:
    way = "the bad step alone"
    if found.window:
        way = f"{phrases.count(found.window, 'step')} from step {found.first}, then the bad one"
    after = f" and {found.after} after it" if found.after else ""
    return f"what if, before {found.incident}: {way}{after}, once for each ({found.steps} steps)"


def _row(outcome: TrialOutcome, *, plain: bool) -> list[Text | str]:
    label = Text(outcome.label, style="bold" if outcome.works else "")
    if outcome.answers:
        label.append(f" [{', '.join(outcome.answers)}]", style="cyan")
    return [
        label,
        _fate(outcome),
        _number(outcome.loss),
        _number(outcome.held_out),
        _share(outcome.distance),
        phrases.sparkline(outcome.losses[-MOST_POINTS:], plain=plain),
    ]


def _fate(outcome: TrialOutcome) -> Text:
    if outcome.works:
        return Text("does not come back", style="green")
    if outcome.why_not:
        return Text(f"not tried: {outcome.why_not}", style="dim")
    return Text(f"step {outcome.bad_step}: {outcome.bad_value}", style="red")


def _share(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if value < MUCH:
        return f"{value:.1%}"
    return f"{value:.0f} times" if value < 10_000 else f"{value:.0e} times"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return phrases.number(value) if math.isfinite(value) else str(value)


def sentences(found: WhatIf) -> list[str]:
    """What to do, and what to know about the trials."""
    best = found.best
    if best is None:
        told = ["Nothing that was tried helps: the cause is in the code or in all of the data."]
    else:
        told = [f"Best: {best.label}.", f"To change: {best.change}."]
    return told + [f"- {remark}" for remark in found.remarks]


@contextmanager
def progress_bar(stream: TextIO | None) -> Iterator[Told]:
    """Yield what is to be told of the trials; it draws a bar where the stream is a terminal."""
    if stream is None or not is_tty(stream):
        yield lambda done, total, name: None
        return
    columns = (TextColumn("what if"), BarColumn(), TextColumn("{task.description}", markup=False))
    console = CleanConsole(file=stream)
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = progress.add_task("", total=None)

    def tell(done: int, total: int, name: str) -> None:
        # Not before there is something to tell: the user may be asked a question first.
        progress.start()
        progress.update(task, completed=done, total=total, description=name)

    with same_random_numbers():
        try:
            yield tell
        finally:
            progress.stop()
