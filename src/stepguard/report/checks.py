"""Verified checkpoints for a terminal: one line each, then what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stepguard.records.checks import (
    BadSamples,
    Identity,
    Outcome,
    Preflight,
    Problem,
    Status,
    Verification,
)
from stepguard.records.codec import printable, to_jsonable
from stepguard.records.incident import Examination, Section
from stepguard.report import phrases, screen
from stepguard.report.screen import Name, Unbroken, middle, titled

# --- The sections of `stepguard doctor` for a terminal.


VERDICT_STYLES = {
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
            f" {number}. ",
            (section.title, "bold"),
            "  ",
            (section.status, VERDICT_STYLES[section.status]),
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


# --- A preflight for a terminal: the state, a table of what fails, warns and passes, and a
# summary.


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
STATUS_STYLES: dict[Status, tuple[str, str]] = {
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
        word, style = STATUS_STYLES[outcome.status]
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


# --- Verified checkpoints for a terminal: one line each, then what is wrong with them.


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
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow"}


def render_results(results: Sequence[Verification], *, width: int, colour: bool) -> str:
    """Render the whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    print_results(console, results)
    assert isinstance(console.file, StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def print_results(console: Console, results: Sequence[Verification]) -> None:
    """Print a table of all checkpoints, the problems of each, and one line that sums up."""
    if any(result.leaves for result in results):
        console.print(_verification_table(results, console.width))
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


def _verification_table(results: Sequence[Verification], width: int) -> Table:
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
            Text(problem.severity, style=SEVERITY_STYLES[problem.severity]),
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


# --- Show the ledger of bad samples: what was lost, where it is in the data set, how often.


MOST_SAMPLES = 40
"""Lines of the table; `--json` has all."""
MOST_ROWS = 3
LONGEST_NAME = 32
SHORTEST_PLACE = 16
HEADINGS = ("step", "attempt", "batch", "rows", "data set", "cause", "left out", "place")
LEFT_OUT = {"sample": "the rows", "micro_batch": "the micro-batch", "step": "the step"}


@dataclass(slots=True)
class Suspect:
    """One sample of the data set and what is held against it."""

    index: Identity | None = None
    id: Identity | None = None
    times: int = 0
    proven: bool = False
    """The step was finite without it and bad with it; else it was only in a batch that was bad."""
    causes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`row 17 (id a.png)`."""
        if self.index is None:
            return f"id {self.id}"
        if self.id is None:
            return f"row {self.index}"
        return f"row {self.index} (id {self.id})"


def suspects(entries: Sequence[BadSamples]) -> list[Suspect]:
    """Samples that broke a step, or may have, by how often; not those only lost with others."""
    found: dict[tuple[Identity | None, Identity | None], Suspect] = {}
    for entry in entries:
        if entry.innocent or not entry.would_fail_again:
            continue
        for index, own in _identities(entry):
            key = (index, own if index is None else None)
            suspect = found.setdefault(key, Suspect(index, own))
            suspect.times += 1
            suspect.proven |= bool(entry.samples)
            if entry.cause not in suspect.causes:
                suspect.causes.append(entry.cause)
    return sorted(found.values(), key=lambda suspect: (not suspect.proven, -suspect.times))


def _identities(entry: BadSamples) -> list[tuple[Identity | None, Identity | None]]:
    indices = entry.indices or ()
    ids = entry.ids or ()
    if indices and len(indices) == len(ids):
        return list(zip(indices, ids, strict=True))
    if indices:
        return [(index, None) for index in indices]
    return [(None, own) for own in ids]


def totals(entries: Sequence[BadSamples]) -> dict[str, int]:
    """Samples lost, steps they were lost in, and all samples of these steps."""
    lost = 0
    steps = {}
    for entry in entries:
        lost += entry.count
        # A step that lost several micro-batches has several entries, each with all its samples.
        steps[entry.run, entry.attempt, entry.incident or entry.step, entry.rank] = entry.of
    return {"lost": lost, "steps": len(steps), "of": sum(steps.values())}


def as_json(
    run: str, entries: Sequence[BadSamples], unread: int, seen_steps: int
) -> dict[str, Any]:
    """Everything there is, for `--json`."""
    return {
        "run": run,
        "entries": [to_jsonable(entry) for entry in entries],
        "totals": {**totals(entries), "steps_seen": seen_steps},
        "samples": [asdict(suspect) for suspect in suspects(entries)],
        "unread": unread,
    }


def render_ledger(
    run: str, entries: Sequence[BadSamples], unread: int, seen_steps: int, width: int
) -> str:
    """The table, the totals, and who was lost more than once."""
    if not entries and not unread:
        return f"no samples were lost in {printable(run)}\n"
    lines = _bad_samples_table(entries[:MOST_SAMPLES], width) if entries else []
    if len(entries) > MOST_SAMPLES:
        lines.append(f"and {len(entries) - MOST_SAMPLES} more; --json lists all")
    lines += ["", _sums(entries, seen_steps), *_repeated(entries)]
    if unread:
        lines.append(
            f"{phrases.count(unread, 'line')} could not be read: a crash while writing, or a full "
            f"disk"
        )
    return "".join(line.rstrip() + "\n" for line in lines)


def _bad_samples_table(entries: Sequence[BadSamples], width: int) -> list[str]:
    rows = [HEADINGS, *map(_bad_samples_cells, entries)]
    widths = []
    for column in range(len(HEADINGS) - 1):
        widths.append(max(len(row[column]) for row in rows))
    room = width - sum(widths) - 2 * len(widths) - 1
    lines = []
    for row in rows:
        cells = [cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)]
        if room >= SHORTEST_PLACE:
            cells.append(middle(row[-1], room))
        lines.append(" " + "  ".join(cells))
    return lines


def _bad_samples_cells(entry: BadSamples) -> tuple[str, ...]:
    attempt = str(entry.attempt)
    if entry.rank:
        attempt += f" rank {entry.rank}"
    batch = "" if entry.batch is None else f"{entry.epoch}:{entry.batch}"
    if entry.micro_batch is not None:
        batch += f" part {entry.micro_batch + 1}"
    rows = f"all {entry.count or ''}"
    if entry.samples:
        rows = phrases.first_few(entry.samples, MOST_ROWS)
    return (
        str(entry.step),
        attempt,
        batch.strip(),
        rows.strip(),
        _names(entry),
        entry.cause,
        LEFT_OUT[entry.left_out],
        "lost with others" if entry.innocent else entry.place,
    )


def _names(entry: BadSamples) -> str:
    """`48211`, `48211 = a.png`, or `a.png`."""
    named = []
    for identity in _identities(entry):
        known = [middle(str(part), LONGEST_NAME) for part in identity if part is not None]
        named.append(" = ".join(known))
    return phrases.first_few(named, MOST_ROWS) or "-"


def _sums(entries: Sequence[BadSamples], seen_steps: int) -> str:
    sums = totals(entries)
    if not sums["of"]:
        return f"{phrases.count(sums['steps'], 'step')} lost samples; how many is not known"
    steps = phrases.count(sums["steps"], "step")
    lost = f"{phrases.count(sums['lost'], 'sample')} lost in {steps}, of {sums['of']:,} in them"
    seen = round(seen_steps * sums["of"] / sums["steps"])
    if seen > sums["of"]:
        lost += f"; {sums['lost'] / seen:.2%} of about {seen:,} seen"
    return lost


def _repeated(entries: Sequence[BadSamples]) -> list[str]:
    again = [suspect for suspect in suspects(entries) if suspect.times > 1]
    if not again:
        return []
    listed = (f"{middle(s.name, LONGEST_NAME)} {s.times} times" for s in again)
    return [f"more than once: {phrases.first_few(listed)}"]
