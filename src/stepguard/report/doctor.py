"""The sections of `stepguard doctor` for a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepguard.records.examination import Examination, Section
from stepguard.report import screen
from stepguard.report.unbroken import Unbroken, titled

STYLES = {
    "fine": "green",
    "warning": "yellow",
    "failed": "bold red",
    "corrupt": "bold red",
    "not checked": "dim",
}


def render_examination(
    found: Examination, *, width: int, colour: bool, unicode: bool = True
) -> str:
    """The whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    paint_examination(console, found, unicode=unicode)
    assert isinstance(console.file, StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def paint_examination(console: Console, found: Examination, *, unicode: bool = True) -> None:
    console.print(titled(f"stepguard doctor: {found.path}", width=console.width, unicode=unicode))
    for number, section in enumerate(found.sections, start=1):
        _section(console, number, section)


def _section(console: Console, number: int, section: Section) -> None:
    console.print(
        Text.assemble(
            f" {number}. ", (section.title, "bold"), "  ", (section.status, STYLES[section.status])
        ),
    )
    _indented(console, section)
    for command in section.commands:
        # never broken, so that it can be copied
        console.print(Text(f"    $ {command}", style="bold"), soft_wrap=True)
    console.print()


def _indented(console: Console, section: Section) -> None:
    grid = Table.grid(padding=(0, 0, 0, 0))
    grid.add_column(width=4)
    grid.add_column()
    for line in section.lines:
        grid.add_row("", Unbroken(line))
    if section.lines:
        console.print(grid)
