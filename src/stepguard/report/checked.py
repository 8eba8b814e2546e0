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

MOST_LISTED = 12
"""Problems shown for one checkpoint; `--json` has all."""
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
        console.print(_table(leaves))
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
    return [problem for problem in each.problems if problem not in inside] if each.format == "folder" else []


def _table(leaves: Sequence[Verification]) -> RenderableType:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(" checkpoint", overflow="fold", ratio=1)
    table.add_column("format", no_wrap=True)
    for name in ("step", "tensors", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for leaf in leaves:
        step = "" if leaf.step is None else f"{leaf.step:,}"
        table.add_row(f" {leaf.path}", leaf.format, step, f"{leaf.tensors:,}", size(leaf.bytes), verdict(leaf))
    return table


def verdict(leaf: Verification) -> Text:
    """`good`, or how many errors and warnings."""
    if not leaf.problems:
        return Text("good", style="green")
    if leaf.ok:
        return Text(f"good, {phrases.count(len(leaf.warnings), 'warning')}", style="yellow")
    word = "corrupt" if leaf.corrupt else "other lr"
    return Text(f"{word}, {phrases.count(len(leaf.errors), 'error')}", style="bold red")


def _details(console: Console, path: str, problems: Sequence[Problem]) -> None:
    console.print()
    console.print(Text(f" {path}", style="bold"), soft_wrap=True)
    ordered = sorted(problems, key=lambda problem: problem.severity != "error")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for problem in ordered[:MOST_LISTED]:
        style = STYLES[problem.severity]
        grid.add_row(Text(problem.severity, style=style), Text(problem.kind, style="cyan"), _sentence(problem, path))
    console.print(Padding(grid, (0, 0, 0, 3)))
    if len(ordered) > MOST_LISTED:
        console.print(Text(f"   and {len(ordered) - MOST_LISTED} more; --json lists all", style="dim"))


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
