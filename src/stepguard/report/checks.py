"""Checks for a terminal: a preflight, a doctor's sections, verified checkpoints, bad samples."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stepguard._errors import JournalError
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
from stepguard.report import screen
from stepguard.report.health import concerns, judge_run
from stepguard.report.phrases import count, first_few, size
from stepguard.report.screen import Name, Unbroken, middle, titled
from stepguard.report.story import Run, read_story
from stepguard.report.summary import IncidentGroup, changed_settings, group_incidents

# --- `stepguard doctor`: its section about the journal, and all sections.

MOST_KINDS = 8
"""Kinds of incidents, and settings, that the doctor lists."""
VERDICT_STYLES = {
    "fine": "green",
    "warning": "yellow",
    "failed": "bold red",
    "corrupt": "bold red",
    "not checked": "dim",
}


def journal_section(folder: Path) -> Section | None:
    """What the run itself has written down: its setting, its end, its incidents by kind."""
    if not (folder / "journal.jsonl").is_file():
        return None
    try:
        story = read_story(folder)
    except (JournalError, OSError) as fault:
        said = f"it cannot be read: {str(fault).splitlines()[0]}"
        return Section(title="journal", status="warning", lines=(said,))
    run = story.latest
    verdict = judge_run(run, (), None, now=True)
    head = f"{count(len(run.steps), 'step')}, {count(len(run.incidents), 'incident')}; "
    head += "it has not ended" if verdict == "waiting" else verdict
    if run.torn:
        head += f"; {count(run.torn, 'line')} cannot be read"
    lines = [head, _ran_with(run), *map(_kind_of_incident, group_incidents(run)[:MOST_KINDS])]
    lines += [concern.text for concern in concerns(run)]
    lines += [
        f"another guard of this run wrote to {other}; examine it too" for other in story.elsewhere
    ]
    shown = tuple(filter(None, lines))
    # A killed run tears the last line; a file of which no line can be read is something else.
    readable = len(run.steps) > 0 or not run.torn
    if verdict in ("healthy", "waiting") and not run.incidents and readable:
        return Section(title="journal", status="fine", lines=shown)
    command = f"stepguard report {shlex.quote(str(folder))}"
    return Section(title="journal", status="warning", lines=shown, commands=(command,))


def _ran_with(run: Run) -> str:
    """Optimizer, schedule, learning rates and settings, as far as they are known."""
    known = [str(run.header[name]) for name in ("optimizer", "schedule") if run.header.get(name)]
    rates = run.steps.values("lr")
    if len(rates):
        known.append(f"learning rate {rates[0]:.4g} at first, {rates[-1]:.4g} at last")
    changed = [f"{name}={value}" for name, value in changed_settings(run.header).items()]
    if changed:
        known.append(f"settings: {first_few(changed, MOST_KINDS)}")
    return ", ".join(known)


def _kind_of_incident(group: IncidentGroup) -> str:
    steps = f"step {group.first_step:,}"
    if group.count > 1:
        steps = f"{group.count} times, steps {group.first_step:,} to {group.last_step:,}"
    cause = f" ({group.code} {group.title})" if group.code else ""
    return f"{steps}: {group.summary}{cause}, {group.where}".removesuffix(", ")


def render_examination(
    found: Examination, *, width: int, colour: bool, unicode: bool = True
) -> str:
    """The whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    console.print(titled(f"stepguard doctor: {found.path}", width=width, unicode=unicode))
    for number, section in enumerate(found.sections, start=1):
        status = (section.status, VERDICT_STYLES[section.status])
        console.print(Text.assemble(f" {number}. ", (section.title, "bold"), "  ", status))
        for line in section.lines:
            console.print(Padding(Unbroken(line), (0, 0, 0, 4)))
        for command in section.commands:
            # never broken, so that it can be copied
            console.print(Text(f"    $ {command}", style="bold"), soft_wrap=True)
        console.print()
    return screen.text_on(console)


# --- A preflight: the state, a table of what fails, warns and passes, and a summary.

SECTIONS: dict[str, tuple[str, ...]] = {
    "precision": ("precision", "scaler"),
    "optimizer and layers": ("optimizer", "norm"),
    "learning rate": ("lr",),
    "configuration": ("config", "launcher"),
    "labels": ("labels",),
    "loss": ("loss",),
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
COUNTED: dict[Status, str] = {
    "fail": "failed",
    "warn": "warned",
    "pass": "passed",
    "not_applicable": "not applicable",
    "not_checked": "not checked",
}
ALIGNED = {
    "aligned": ("configuration is aligned", "green"),
    "contradicted": ("configuration is NOT aligned", "bold red"),
    "unproven": ("alignment is not proven", "yellow"),
}
ID_WIDTH = 23


def paint_preflight(console: Console, result: Preflight, *, unicode: bool = True) -> None:
    """Print state, sections and summary; a section without an outcome is left out."""

    def title(text: str) -> None:
        console.print(titled(text, width=console.width, unicode=unicode))

    title(f"stepguard check: {result.target}".removesuffix(": "))
    if result.facts:
        console.print(_grid(*_state_rows(result)))
    for heading, parts in SECTIONS.items():
        checked = result.of("pass", "warn", "fail", "not_applicable")
        rows = [_outcome_row(outcome) for outcome in checked if outcome.section in parts]
        if rows:
            title(heading)
            console.print(_grid(*rows, widths=(5, ID_WIDTH)))
    # Grouped by what to give, so that ten items that wait for one thing are one line.
    waiting: dict[str, list[str]] = {}
    for outcome in result.of("not_checked"):
        waiting.setdefault(" ".join(outcome.evidence[:1]), []).append(outcome.id)
    if waiting:
        title("not checked")
    for give, ids in waiting.items():
        console.print(Unbroken(f" {give}"))
        console.print(Padding(Unbroken(", ".join(ids), "dim"), (0, 0, 0, 4)))
    console.print(Rule(characters="─" if unicode else "-", style="dim"))
    counts = [f"{len(result.of(status))} {words}" for status, words in COUNTED.items()]
    verdict, style = "ready", "green"
    if not result.ok:
        verdict, style = "not ready", "bold red"
        counts[0] += f" ({', '.join(outcome.id for outcome in result.of('fail'))})"
    elif result.of("warn"):
        verdict, style = "ready, with warnings", "bold yellow"
    console.print(Text.assemble((f" {verdict}", style), f": {', '.join(counts)}"))


def _state_rows(result: Preflight) -> list[tuple[RenderableType, ...]]:
    rows: list[tuple[RenderableType, ...]] = []
    for name in dict.fromkeys(name for name, _ in result.facts):
        values = [Unbroken(value) for other, value in result.facts if other == name]
        rows.append((Text(f" {name}", "cyan"), Group(*values)))
    status = [Unbroken(*ALIGNED[result.alignment])]
    status += [Unbroken(why, "dim") for why in result.alignment_why]
    return [*rows, (Text(" status", "cyan"), Group(*status))]


def _outcome_row(outcome: Outcome) -> tuple[RenderableType, ...]:
    """What was found; for a warning or failure also what is expected and how to fix it."""
    word, style = STATUS_STYLES[outcome.status]
    wrong = outcome.status in ("warn", "fail")
    lines = [Unbroken(sentence, "" if wrong else "dim") for sentence in outcome.evidence]
    if wrong:
        lines.insert(0, Unbroken(f"expected: {outcome.title}", style))
    if outcome.fix:
        lines.append(Unbroken(Text.assemble(("fix: ", "bold cyan"), outcome.fix)))
    return Text(f" {word}", style=style), Name(outcome.id), Group(*lines)


def _grid(*rows: tuple[RenderableType, ...], widths: tuple[int, ...] = ()) -> Table:
    """Columns of these widths, else as wide as needed; the last takes what is left."""
    grid = Table.grid(padding=(0, 1 if widths else 2, 0, 0), expand=bool(widths))
    for number in range(len(rows[0]) - 1):
        grid.add_column(width=dict(enumerate(widths)).get(number), no_wrap=number != 1)
    grid.add_column(ratio=1 if widths else None)
    for row in rows:
        grid.add_row(*row)
    return grid


# --- Verified checkpoints: one line each, then what is wrong with them.

MOST_LISTED = 12
"""Problems shown for one checkpoint; `--json` has all."""
WIDE = 80
"""Columns of a window that has room for all of the table."""
UNSAFE = frozenset({"hostile", "global"})
"""Kinds of a file that may be complete and finite, but could run code when it is loaded."""
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow"}


def render_results(results: Sequence[Verification], *, width: int, colour: bool) -> str:
    """A table of all checkpoints, the problems of each, and one line that sums up."""
    console = screen.paper(width=width, colour=colour)
    leaves = [(leaf, result) for result in results for leaf in result.leaves]
    if leaves:
        console.print(_verification_table(leaves, width))
    for leaf, _ in leaves:
        _print_problems(console, leaf.path, leaf.problems)
    for result in results:
        if result.format == "folder":
            # Those that belong to none of the folder's checkpoints.
            inside = {problem for part in result.parts for problem in part.problems}
            _print_problems(console, result.path, [p for p in result.problems if p not in inside])
    console.print()
    console.print(_conclusion([leaf for leaf, _ in leaves], sum(r.seconds for r in results)))
    return screen.text_on(console)


def _verification_table(leaves: Sequence[tuple[Verification, Verification]], width: int) -> Table:
    """Draw one line a checkpoint; in a narrow window with fewer columns, `--json` has them all."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(" checkpoint", ratio=1)
    table.add_column("format", no_wrap=True)
    for title in ("step", "tensors", "size") if width >= WIDE else ():
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for leaf, result in leaves:
        # The folder that was asked for and the way down from it: `run/step-3`.
        above = result.path.rstrip("/").rpartition("/")[0]
        name = leaf.path if leaf is result else leaf.path.removeprefix(f"{above}/")
        if leaf.pointer:
            name = f"{leaf.pointer} -> {leaf.path.rpartition('/')[2]}"
        cells = [leaf.format]
        if width >= WIDE:
            step = "" if leaf.step is None else f"{leaf.step:,}"
            cells += [step, f"{leaf.tensors:,}", size(leaf.bytes)]
        table.add_row(Name(f" {name}"), *cells, _verdict(leaf))
    return table


def _kind(leaf: Verification) -> str:
    if leaf.ok:
        return "good"
    if leaf.corrupt:
        return "corrupt"
    return "diverged" if leaf.diverged else "with another learning rate"


def _verdict(leaf: Verification) -> Text:
    """Return `good`, or how many errors and warnings there are."""
    kind = _kind(leaf)
    if leaf.ok:
        warnings = f", {count(len(leaf.warnings), 'warning')}" if leaf.warnings else ""
        return Text(f"good{warnings}", style="yellow" if warnings else "green")
    if leaf.corrupt and all(problem.kind in UNSAFE for problem in leaf.errors):
        kind = "unsafe"
    errors = "" if kind == "diverged" else f", {count(len(leaf.errors), 'error')}"
    return Text(f"{kind.replace('with another learning rate', 'other lr')}{errors}", "bold red")


def _print_problems(console: Console, path: str, problems: Sequence[Problem]) -> None:
    if not problems:
        return
    console.print()
    # outside the table and never wrapped, so that it can be copied
    console.print(Text(f" {path}", style="bold"), soft_wrap=True)
    rows = []
    for problem in sorted(problems, key=lambda problem: problem.severity)[:MOST_LISTED]:
        inner = problem.file.removeprefix(path).lstrip("/")
        place = (f"{inner}: ", "dim") if inner and problem.file != path else ""
        tensor = (problem.tensor or "", "bold")
        role = f" ({problem.role})" if problem.tensor and problem.role else ""
        between = f"{role}: " if problem.tensor else ""
        rows.append(
            (
                Text(problem.severity, style=SEVERITY_STYLES[problem.severity]),
                Text(problem.kind, style="cyan", no_wrap=True),
                Unbroken(Text.assemble(place, tensor, between, problem.detail)),
            )
        )
    console.print(Padding(_grid(*rows), (0, 0, 0, 3)))
    if len(problems) > MOST_LISTED:
        more = len(problems) - MOST_LISTED
        console.print(Text(f"   and {more} more; --json lists all", style="dim"))


def _conclusion(leaves: Sequence[Verification], seconds: float) -> Text:
    """Sum up: `3 checkpoints, 2 good, 1 corrupt; 1,204 tensors, 2.1 GB in 1.4 s (1.5 GB/s)`."""
    if not leaves:
        return Text(" no checkpoint found", style="yellow")
    kinds = Counter(map(_kind, leaves))
    good = kinds.pop("good", 0)
    line = f" {count(len(leaves), 'checkpoint')}, {good} good"
    line += "".join(f", {number} {kind}" for kind, number in sorted(kinds.items()))
    total = sum(leaf.bytes for leaf in leaves)
    tensors = count(sum(leaf.tensors for leaf in leaves), "tensor")
    line += f"; {tensors}, {size(total)} in {seconds:.1f} s"
    # below half a second the speed would be that of opening files
    if seconds > 0.5:
        line += f" ({size(total / seconds)}/s)"
    return Text(line, style="green" if good == len(leaves) else "bold red")


# --- The ledger of bad samples: what was lost, where it is in the data set, how often.

MOST_SAMPLES = 40
"""Lines of the table; `--json` has all."""
MOST_ROWS = 3
LONGEST_NAME = 32
SHORTEST_PLACE = 16
HEADINGS = ("step", "attempt", "batch", "rows", "data set", "cause", "dropped", "place")
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
        return f"row {self.index}" + ("" if self.id is None else f" (id {self.id})")


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
    indices, ids = entry.indices or (), entry.ids or ()
    if indices and len(indices) == len(ids):
        return list(zip(indices, ids, strict=True))
    return [(index, None) for index in indices] or [(None, own) for own in ids]


def totals(entries: Sequence[BadSamples]) -> dict[str, int]:
    """Samples lost, steps they were lost in, and all samples of these steps."""
    lost = sum(entry.count for entry in entries)
    by_rank = _of_steps(entries)
    # Every rank records a step that it lost samples in, and draws a run id of its own.
    steps = {moment for moment, _ in by_rank}
    return {"lost": lost, "steps": len(steps), "of": sum(by_rank.values())}


def _of_steps(entries: Sequence[BadSamples]) -> dict[tuple[tuple[int, str], int], int]:
    """Step and rank -> the samples of that rank in the step."""
    # A step that lost several micro-batches has several entries, each with all its samples.
    return {
        ((entry.attempt, entry.incident or str(entry.step)), entry.rank): entry.of
        for entry in entries
    }


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
    lines = []
    if entries:
        rows = [HEADINGS, *map(_ledger_row, entries[:MOST_SAMPLES])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        room = width - sum(widths) - 2 * len(widths) - 1
        for row in rows:
            cells = [cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)]
            if room >= SHORTEST_PLACE:
                cells.append(middle(row[-1], room))
            lines.append(" " + "  ".join(cells))
    if len(entries) > MOST_SAMPLES:
        lines.append(f"and {len(entries) - MOST_SAMPLES} more; --json lists all")
    lines += ["", _lost(entries, seen_steps)]
    again = [suspect for suspect in suspects(entries) if suspect.times > 1]
    if again:
        listed = (f"{middle(s.name, LONGEST_NAME)} {s.times} times" for s in again)
        lines.append(f"more than once: {first_few(listed)}")
    if unread:
        lines.append(
            f"{count(unread, 'line')} could not be read: a crash while writing, or a full disk"
        )
    return "".join(line.rstrip() + "\n" for line in lines)


def _lost(entries: Sequence[BadSamples], seen_steps: int) -> str:
    """`seen_steps`: those of all ranks."""
    sums = totals(entries)
    steps = count(sums["steps"], "step")
    if not sums["of"]:
        return f"{steps} lost samples; how many is not known"
    seen = round(seen_steps * sums["of"] / len(_of_steps(entries)))
    share = f"; {sums['lost'] / seen:.2%} of about {seen:,} seen" if seen > sums["of"] else ""
    return f"{count(sums['lost'], 'sample')} lost in {steps}, of {sums['of']:,} in them{share}"


def _ledger_row(entry: BadSamples) -> tuple[str, ...]:
    batch = "" if entry.batch is None else f"{entry.epoch}:{entry.batch}"
    if entry.micro_batch is not None:
        batch += f" part {entry.micro_batch + 1}"
    rows = f"all {entry.count or ''}"
    if entry.samples:
        rows = first_few(entry.samples, MOST_ROWS)
    named = []
    for identity in _identities(entry):
        # `48211`, `48211 = a.png`, or `a.png`.
        known = [middle(str(part), LONGEST_NAME) for part in identity if part is not None]
        named.append(" = ".join(known))
    return (
        str(entry.step),
        f"{entry.attempt} rank {entry.rank}".removesuffix(" rank 0"),
        batch.strip(),
        rows.strip(),
        first_few(named, MOST_ROWS) or "-",
        entry.cause,
        LEFT_OUT[entry.left_out],
        "lost with others" if entry.innocent else entry.place,
    )
