"""A preflight for a terminal: the state, a table of what fails, warns and passes, and a summary."""

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
    title = "stepguard check"
    if result.target:
        title += f": {result.target}"
    _title(console, title, unicode)
    if result.facts:
        console.print(_state(result))
    checked = result.of("pass", "warn", "fail", "not_applicable")
    for heading, parts in SECTIONS.items():
        inside = [outcome for outcome in checked if outcome.section in parts]
        if inside:
            _title(console, heading, unicode)
            console.print(_table(inside))
    missing = result.of("not_checked")
    if missing:
        _title(console, "not checked", unicode)
        console.print(_missing(missing))
    line = "─" if unicode else "-"
    console.print(Rule(characters=line, style="dim"))
    console.print(_summary(result))


def _title(console: Console, text: str, unicode: bool) -> None:
    console.print(titled(text, width=console.width, unicode=unicode))


def _state(result: Preflight) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column()
    before = ""
    for name, value in result.facts:
        label = ""
        # Several values of one name: the name stands at the first.
        if name != before:
            label = f" {name}"
        grid.add_row(label, Unbroken(value))
        before = name
    text, style = ALIGNED[result.alignment]
    lines = [Unbroken(text, style)]
    lines += [Unbroken(why, "dim") for why in result.alignment_why]
    grid.add_row(" status", Group(*lines))
    return grid


def _table(outcomes: Iterable[Outcome]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=5, no_wrap=True)
    table.add_column(width=ID_WIDTH)
    table.add_column(ratio=1)
    for outcome in outcomes:
        word, style = STYLES[outcome.status]
        table.add_row(Text(f" {word}", style=style), Name(outcome.id), _lines(outcome, style))
    return table


def _lines(outcome: Outcome, style: str) -> Group:
    """What was found; for a warning or failure also what is expected and how to fix it."""
    if outcome.status in ("pass", "not_applicable"):
        return Group(*[Unbroken(sentence, "dim") for sentence in outcome.evidence])
    lines = [Unbroken(f"expected: {outcome.title}", style)]
    lines += [Unbroken(sentence) for sentence in outcome.evidence]
    if outcome.fix:
        lines.append(Unbroken(Text.assemble(("fix: ", "bold cyan"), outcome.fix)))
    return Group(*lines)


def _missing(outcomes: Iterable[Outcome]) -> RenderableType:
    """Group by what to give, so that ten items that wait for one thing are one line."""
    waiting: dict[str, list[str]] = {}
    for outcome in outcomes:
        give = " ".join(outcome.evidence[:1])
        waiting.setdefault(give, []).append(outcome.id)
    lines: list[RenderableType] = []
    for give, ids in waiting.items():
        lines.append(Unbroken(f" {give}"))
        lines.append(Padding(Unbroken(", ".join(ids), "dim"), (0, 0, 0, 4)))
    return Group(*lines)


def _summary(result: Preflight) -> Text:
    failed = result.of("fail")
    warned = result.of("warn")
    verdict = "ready"
    style = "green"
    names = ""
    if failed:
        verdict = "not ready"
        style = "bold red"
        names = f" ({', '.join(outcome.id for outcome in failed)})"
    elif warned:
        verdict = "ready, with warnings"
        style = "bold yellow"
    counts = (
        f": {len(failed)} failed{names}, {len(warned)} warned, {len(result.of('pass'))} passed, "
        f"{len(result.of('not_applicable'))} not applicable, "
        f"{len(result.of('not_checked'))} not checked"
    )
    return Text.assemble((f" {verdict}", style), counts)
