"""Verified checkpoints for a terminal: one line each, then what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepguard.records.verification import Problem, Verification
from stepguard.report import phrases, screen
from stepguard.report.unbroken import Name, Unbroken

MOST_LISTED = 12
"""Problems shown for one checkpoint; `--json` has all."""
NAME_WIDTH = 24
"""Columns that a name gets at least."""
GAP = 2
"""Blanks between two columns."""
ORDER = ("format", "step", "tensors", "size")
"""Optional columns from left to right."""
IMPORTANCE = ("format", "size", "step", "tensors")
"""In a narrow window the last ones are left out first."""
UNSAFE = frozenset({"hostile", "global"})
"""Kinds of a file that may be complete and finite, but could run code when it is loaded."""
STYLES = {"error": "bold red", "warning": "yellow"}


def render_results(results: Sequence[Verification], *, width: int, colour: bool) -> str:
    """Render the whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    print_results(console, results)
    assert isinstance(console.file, StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def print_results(console: Console, results: Sequence[Verification]) -> None:
    """Print a table of all checkpoints, the problems of each, and one line that sums up."""
    if any(result.leaves for result in results):
        console.print(_table(results, console.width))
    for result in results:
        for leaf in result.leaves:
            if leaf.problems:
                _print_details(console, leaf.path, leaf.problems)
    for result in results:
        own = _own_problems(result)
        if own:
            _print_details(console, result.path, own)
    console.print()
    console.print(conclusion(results))


def _own_problems(result: Verification) -> list[Problem]:
    """Return the problems of a folder that belong to none of its checkpoints."""
    if result.format != "folder":
        return []
    inside: set[Problem] = set()
    for part in result.parts:
        inside.update(part.problems)
    return [problem for problem in result.problems if problem not in inside]


def _table(results: Sequence[Verification], width: int) -> Table:
    """Draw one line a checkpoint; in a narrow window with fewer columns, `--json` has them all."""
    names = []
    rows = []
    verdicts = []
    for result in results:
        for leaf in result.leaves:
            name = below(leaf.path, result.path)
            if leaf.pointer:
                name = f"{leaf.pointer} -> {name.rpartition('/')[2]}"
            names.append(name)
            rows.append(_cells(leaf))
            verdicts.append(verdict(leaf))
    room = width - NAME_WIDTH - GAP - max(map(len, verdicts))
    shown = _columns_that_fit(rows, room)
    table = Table(box=None, header_style="dim", padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(" checkpoint", ratio=1)
    for column in shown:
        is_text = column == "format"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for name, row, result_text in zip(names, rows, verdicts, strict=True):
        table.add_row(Name(f" {name}"), *(row[column] for column in shown), result_text)
    return table


def _cells(leaf: Verification) -> dict[str, str]:
    return {
        "format": leaf.format,
        "size": phrases.size(leaf.bytes),
        "step": "" if leaf.step is None else f"{leaf.step:,}",
        "tensors": f"{leaf.tensors:,}",
    }


def _columns_that_fit(rows: Sequence[dict[str, str]], room: int) -> list[str]:
    fitting = set()
    for column in IMPORTANCE:
        room -= GAP + max(len(column), *(len(row[column]) for row in rows))
        if room >= 0:
            fitting.add(column)
    return [column for column in ORDER if column in fitting]


def below(path: str, asked: str) -> str:
    """Shorten a path to the folder that was asked for and the way down from it: `run/step-3`."""
    folder = asked.rstrip("/")
    inner = path.removeprefix(f"{folder}/")
    if inner == path:
        return path
    name = folder.rpartition("/")[2]
    return f"{name}/{inner}" if name else inner


def verdict(leaf: Verification) -> Text:
    """Return `good`, or how many errors and warnings there are."""
    if not leaf.problems:
        return Text("good", style="green")
    if leaf.ok:
        return Text(f"good, {phrases.count(len(leaf.warnings), 'warning')}", style="yellow")
    if leaf.diverged and not leaf.corrupt:
        return Text("diverged", style="bold red")
    word = "corrupt" if leaf.corrupt else "other lr"
    if all(problem.kind in UNSAFE for problem in leaf.errors):
        word = "unsafe"
    return Text(f"{word}, {phrases.count(len(leaf.errors), 'error')}", style="bold red")


def _print_details(console: Console, path: str, problems: Sequence[Problem]) -> None:
    console.print()
    # outside the table and never wrapped, so that it can be copied
    console.print(Text(f" {path}", style="bold"), soft_wrap=True)
    ordered = sorted(problems, key=lambda problem: problem.severity != "error")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for problem in ordered[:MOST_LISTED]:
        grid.add_row(
            Text(problem.severity, style=STYLES[problem.severity]),
            Text(problem.kind, style="cyan"),
            Unbroken(_sentence(problem, path)),
        )
    console.print(Padding(grid, (0, 0, 0, 3)))
    more = len(ordered) - MOST_LISTED
    if more > 0:
        console.print(Text(f"   and {more} more; --json lists all", style="dim"))


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


def conclusion(results: Sequence[Verification]) -> Text:
    """Sum up: `3 checkpoints, 2 good, 1 corrupt; 1,204 tensors, 2.1 GB in 1.4 s (1.5 GB/s)`."""
    leaves = [leaf for result in results for leaf in result.leaves]
    if not leaves:
        return Text(" no checkpoint found", style="yellow")
    good = sum(leaf.ok for leaf in leaves)
    corrupt = sum(leaf.corrupt for leaf in leaves)
    diverged = sum(leaf.diverged and not leaf.corrupt for leaf in leaves)
    other = len(leaves) - good - corrupt - diverged
    line = f" {phrases.count(len(leaves), 'checkpoint')}, {good} good"
    if corrupt:
        line += f", {corrupt} corrupt"
    if diverged:
        line += f", {diverged} diverged"
    if other:
        line += f", {other} with another learning rate"
    line += f"; {_amounts(leaves, sum(result.seconds for result in results))}"
    return Text(line, style="green" if good == len(leaves) else "bold red")


def _amounts(leaves: Sequence[Verification], seconds: float) -> str:
    tensors = phrases.count(sum(leaf.tensors for leaf in leaves), "tensor")
    total = sum(leaf.bytes for leaf in leaves)
    text = f"{tensors}, {phrases.size(total)} in {seconds:.1f} s"
    # below half a second the speed would be that of opening files
    if seconds > 0.5:
        text += f" ({phrases.size(total / seconds)}/s)"
    return text
