"""Verified checkpoints for a terminal: one line each, then what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepguard.records.verification import Problem, Verification
from stepguard.report import phrases, screen
from stepguard.report.unbroken import Name, Unbroken

MOST_LISTED = 12
"""Problems shown for one checkpoint; `--json` has all."""
NAME_WIDTH, GAP = 24, 2
"""Columns that a name gets at least, and blanks between two columns."""
ORDER = ("format", "step", "tensors", "size")
UNSAFE = frozenset({"hostile", "global"})
"""Kinds of a file that may be whole and finite, but could run code when it is loaded."""
STYLES = {"error": "bold red", "warning": "yellow"}


def render_checked(found: Sequence[Verification], *, width: int, colour: bool) -> str:
    """The whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    paint_checked(console, found)
    assert isinstance(console.file, StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def paint_checked(console: Console, found: Sequence[Verification]) -> None:
    """A table of all checkpoints, the problems of each, and one line that sums up."""
    leaves = [leaf for each in found for leaf in each.leaves]
    if leaves:
        console.print(_table(found, console.width))
    for leaf in leaves:
        if leaf.problems:
            _details(console, leaf.path, leaf.problems)
    for each in found:
        own = _own(each)
        if own:
            _details(console, each.path, own)
    console.print()
    console.print(conclusion(found))


def _own(each: Verification) -> list[Problem]:
    """Of a folder: what belongs to none of its checkpoints."""
    inside = {problem for part in each.parts for problem in part.problems}
    return (
        [problem for problem in each.problems if problem not in inside]
        if each.format == "folder"
        else []
    )


def _table(found: Sequence[Verification], width: int) -> RenderableType:
    """One line a checkpoint. In a narrow window the less telling columns are left out; `--json` has
    them all.
    """
    leaves = [leaf for each in found for leaf in each.leaves]
    columns = {
        "format": [leaf.format for leaf in leaves],
        "size": [size(leaf.bytes) for leaf in leaves],
        "step": ["" if leaf.step is None else f"{leaf.step:,}" for leaf in leaves],
        "tensors": [f"{leaf.tensors:,}" for leaf in leaves],
    }
    verdicts = [verdict(leaf) for leaf in leaves]
    room = width - NAME_WIDTH - GAP - max(len(text) for text in verdicts)
    shown = []
    for name, cells in columns.items():
        room -= GAP + max(len(name), *map(len, cells))
        if room >= 0:
            shown.append(name)
    table = Table(box=None, header_style="dim", padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(" checkpoint", ratio=1)
    for name in ORDER:
        if name in shown:
            table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    names = [below(leaf.path, each.path) for each in found for leaf in each.leaves]
    for row, name in enumerate(names):
        cells = [columns[column][row] for column in ORDER if column in shown]
        table.add_row(Name(f" {name}"), *cells, verdicts[row])
    return table


def below(path: str, asked: str) -> str:
    """`run/step-3` for what lies in `/any/where/run`: the folder that was asked for, and the way
    down from it.
    """
    inner = path.removeprefix(asked.rstrip("/") + "/")
    if inner == path:
        return path
    return "/".join(part for part in (asked.rstrip("/").rpartition("/")[2], inner) if part)


def verdict(leaf: Verification) -> Text:
    """`good`, or how many errors and warnings."""
    if not leaf.problems:
        return Text("good", style="green")
    if leaf.ok:
        return Text(f"good, {phrases.count(len(leaf.warnings), 'warning')}", style="yellow")
    word = "corrupt" if leaf.corrupt else "other lr"
    if all(problem.kind in UNSAFE for problem in leaf.errors):
        word = "unsafe"
    return Text(f"{word}, {phrases.count(len(leaf.errors), 'error')}", style="bold red")


def _details(console: Console, path: str, problems: Sequence[Problem]) -> None:
    console.print()
    # not in the table: whole, so that it can be copied
    console.print(Text(f" {path}", style="bold"), soft_wrap=True)
    ordered = sorted(problems, key=lambda problem: problem.severity != "error")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for problem in ordered[:MOST_LISTED]:
        style = STYLES[problem.severity]
        grid.add_row(
            Text(problem.severity, style=style),
            Text(problem.kind, style="cyan"),
            Unbroken(_sentence(problem, path)),
        )
    console.print(Padding(grid, (0, 0, 0, 3)))
    if len(ordered) > MOST_LISTED:
        console.print(
            Text(f"   and {len(ordered) - MOST_LISTED} more; --json lists all", style="dim")
        )


def _sentence(problem: Problem, path: str) -> Text:
    text = Text()
    inner = problem.file.removeprefix(path).lstrip("/")
    if inner and problem.file != path:
        text.append(f"{inner}: ", style="dim")
    if problem.tensor:
        text.append(problem.tensor, style="bold")
        text.append(f" ({problem.role}): " if problem.role else ": ")
    text.append(problem.detail)
    return text


def conclusion(found: Sequence[Verification]) -> Text:
    """`3 checkpoints, 2 good, 1 corrupt; 1,204 tensors, 2.1 GB in 1.4 s (1.5 GB/s)`."""
    leaves = [leaf for each in found for leaf in each.leaves]
    if not leaves:
        return Text(" no checkpoint found", style="yellow")
    corrupt = sum(leaf.corrupt for leaf in leaves)
    other = sum(not leaf.ok and not leaf.corrupt for leaf in leaves)
    parts = [phrases.count(len(leaves), "checkpoint"), f"{len(leaves) - corrupt - other} good"]
    parts += [f"{corrupt} corrupt"] if corrupt else []
    parts += [f"{other} with another learning rate"] if other else []
    total, seconds = sum(leaf.bytes for leaf in leaves), sum(each.seconds for each in found)
    speed = f" ({size(total / seconds)}/s)" if seconds > 0.5 else ""
    tensors = phrases.count(sum(leaf.tensors for leaf in leaves), "tensor")
    line = f" {', '.join(parts)}; {tensors}, {size(total)} in {seconds:.1f} s{speed}"
    return Text(line, style="bold red" if corrupt or other else "green")


def size(count: float) -> str:
    """`2.1 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
