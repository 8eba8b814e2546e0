"""A preflight for a terminal: the state, a table of what fails, warns and passes, and one line that
sums it up.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stepguard.records.preflight import Outcome, Preflight, Status
from stepguard.report import screen
from stepguard.report.unbroken import Name, Unbroken, titled

SECTIONS: dict[str, tuple[str, ...]] = {
    "precision": ("precision", "scaler"),
    "optimizer and layers": ("optimizer", "norm"),
    "learning rate": ("lr",),
    "configuration": ("config", "launcher"),
    "labels": ("labels",),
    "data": ("data",),
    "model": ("model", "scalars", "code"),
    "checkpoint": ("checkpoint",),
    "resources": ("disk", "memory"),
    "checklist": ("checklist",),
}
"""Heading -> first parts of ids."""
STYLES: dict[Status, tuple[str, str]] = {
    "pass": ("pass", "green"),
    "warn": ("warn", "bold yellow"),
    "fail": ("FAIL", "bold red"),
    "not_applicable": ("n/a", "dim"),
    "not_checked": ("-", "dim"),
}
ALIGNED = {
    "aligned": ("configuration is aligned", "green"),
    "contradicted": ("configuration is NOT aligned", "bold red"),
    "unproven": ("alignment is not proven", "yellow"),
}
ID_WIDTH = 23


def render_preflight(
    result: Preflight, *, width: int = 100, colour: bool = False, unicode: bool = True
) -> str:
    """The whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    paint_preflight(console, result, unicode=unicode)
    assert isinstance(console.file, StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def paint_preflight(console: Console, result: Preflight, *, unicode: bool = True) -> None:
    """Print state, sections and summary; a section without an outcome is left out."""
    _title(
        console,
        f"stepguard check: {result.target}" if result.target else "stepguard check",
        unicode,
    )
    if result.facts:
        console.print(_state(result))
    for heading, parts in SECTIONS.items():
        inside = [o for o in result.outcomes if o.section in parts and o.status != "not_checked"]
        if inside:
            _title(console, heading, unicode)
            console.print(_table(inside))
    missing = result.of("not_checked")
    if missing:
        _title(console, "not checked", unicode)
        console.print(_missing(missing))
    console.print(Rule(characters="─" if unicode else "-", style="dim"))
    console.print(_summary(result))


def _title(console: Console, text: str, unicode: bool) -> None:
    console.print(titled(text, width=console.width, unicode=unicode))


def _state(result: Preflight) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column()
    before = ""
    for name, value in result.facts:
        grid.add_row(f" {name}" if name != before else "", Unbroken(value))
        before = name
    text, style = ALIGNED[result.alignment]
    lines = [Unbroken(text, style), *(Unbroken(why, "dim") for why in result.alignment_why)]
    grid.add_row(" status", Group(*lines))
    return grid


def _table(outcomes: Iterable[Outcome]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=5, no_wrap=True)
    table.add_column(width=ID_WIDTH)
    table.add_column(ratio=1)
    for outcome in outcomes:
        word, style = STYLES[outcome.status]
        quiet = outcome.status in ("pass", "not_applicable")
        lines = [Unbroken(sentence, "dim" if quiet else "") for sentence in outcome.evidence]
        if not quiet:
            lines.insert(0, Unbroken(f"expected: {outcome.title}", style))
        if outcome.fix:
            lines.append(Unbroken(Text.assemble(("fix: ", "bold cyan"), outcome.fix)))
        table.add_row(Text(f" {word}", style=style), Name(outcome.id), Group(*lines))
    return table


def _missing(outcomes: Iterable[Outcome]) -> RenderableType:
    """Grouped by what to give, so that ten items that wait for one thing are one line."""
    wanted: dict[str, list[str]] = {}
    for outcome in outcomes:
        wanted.setdefault(outcome.evidence[0] if outcome.evidence else "", []).append(outcome.id)
    lines: list[RenderableType] = []
    for give, ids in wanted.items():
        lines += [Unbroken(f" {give}"), Padding(Unbroken(", ".join(ids), "dim"), (0, 0, 0, 4))]
    return Group(*lines)


def _summary(result: Preflight) -> Text:
    failed, warned, passed = (len(result.of(status)) for status in ("fail", "warn", "pass"))
    rest = (
        f"{len(result.of('not_applicable'))} not applicable, {len(result.of('not_checked'))} "
        f"not checked"
    )
    verdict, style = ("ready", "green") if not warned else ("ready, with warnings", "bold yellow")
    names = ""
    if failed:
        verdict, style = "not ready", "bold red"
        names = f" ({', '.join(outcome.id for outcome in result.of('fail'))})"
    return Text.assemble(
        (f" {verdict}", style),
        f": {failed} failed{names}, {warned} warned, {passed} passed, {rest}",
    )
