"""The deep looks of a run as tables of plain words, and what would have helped (`whatif`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from stepguard.records.probes import Look, ParameterLook, TensorLook, WhatIf
from stepguard.report import phrases, screen
from stepguard.report.screen import (
    CleanConsole,
    draw,
    is_tty,
    middle,
    put,
    same_random_numbers,
    takes_unicode,
)
from stepguard.report.story import Run

# --- Show what would have helped: a table of the candidates, the best first, and what to change.


Report = Callable[[int, int, str], None]
"""Gets the trials that are done, all of them, and the name of the present one."""


def show(found: WhatIf, stream: TextIO) -> None:
    """Print the table."""
    plain = not takes_unicode(stream)
    put(draw(stream, lambda console: paint_trials(found, console, plain=plain)), stream)


def paint_trials(found: WhatIf, console: Console, *, plain: bool = False) -> None:
    """Draw the table, the best candidate in words, and what to know about the trials."""
    window = "only the bad step"
    if found.window:
        window = f"{phrases.count(found.window, 'step')} from step {found.first}, then the bad one"
    if found.after:
        window += f" and {found.after} after it"
    console.print(
        Text(f"what if, before {found.incident}: {window}, once for each ({found.steps} steps)")
    )
    console.print()
    rows = []
    for outcome in found.outcomes:
        label = Text(outcome.label, style="bold" if outcome.works else "")
        if outcome.answers:
            label.append(f" [{', '.join(outcome.answers)}]", style="cyan")
        fate = Text(f"step {outcome.bad_step}: {outcome.bad_value}", style="red")
        if outcome.works:
            fate = Text("does not come back", style="green")
        elif outcome.why_not:
            fate = Text(f"not tried: {outcome.why_not}", style="dim")
        numbers = (phrases.number(outcome.loss), phrases.number(outcome.held_out))
        drawn = phrases.sparkline(outcome.losses[-MOST_DRAWN:], plain=plain)
        moved = "-"
        if outcome.distance is not None and math.isfinite(outcome.distance):
            moved = f"{outcome.distance:.3g} times"
            if outcome.distance < 10:
                moved = f"{outcome.distance:.1%}"
        rows.append((label, fate, *numbers, moved, drawn))
    headings = ("what if", "bad value", "loss", "held out", "weights moved", "losses")
    table = screen.table(rows, headings, first="", numbers_from=2)
    table.columns[0].no_wrap = False
    console.print(table)
    console.print()
    for sentence in sentences(found):
        console.print(Text(sentence))


def sentences(found: WhatIf) -> list[str]:
    """What to do, and what to know about the trials."""
    advice = ["Nothing that was tried helps: the cause is in the code or in all of the data."]
    if found.best is not None:
        advice = [f"Best: {found.best.label}.", f"To change: {found.best.change}."]
    return advice + [f"- {remark}" for remark in found.remarks]


@contextmanager
def progress_bar(stream: TextIO | None) -> Iterator[Report]:
    """Yield what the trials report to; it draws a bar where the stream is a terminal."""
    if stream is None or not is_tty(stream):
        yield lambda done, total, name: None
        return
    columns = (TextColumn("what if"), BarColumn(), TextColumn("{task.description}", markup=False))
    console = CleanConsole(file=stream)
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = progress.add_task("", total=None)

    def report(done: int, total: int, name: str) -> None:
        # Not before there is something to report: the user may be asked a question first.
        progress.start()
        progress.update(task, completed=done, total=total, description=name)

    with same_random_numbers():
        try:
            yield report
        finally:
            progress.stop()


# --- The deep looks of a run as tables: worst first, with the history of one figure.


class Kind(NamedTuple):
    """How one kind of row is shown; each function takes the row."""

    part: str
    """Field of `Look`."""
    title: str
    cells: dict[str, Callable[[Any], str]]
    """By heading; the first one names the row."""
    worst: Callable[[Any], float | None]
    """The largest comes first; None is not shown."""
    history: str = ""
    figure: Callable[[Any], float | None] = lambda row: None
    """What the history shows."""
    alarm: int = 0
    """Number of the cell that is coloured where `alarming` says so."""
    alarming: Callable[[Any], bool] = lambda row: False


def _cell(name: str, form: str = ".0%") -> Callable[[Any], str]:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else format(value, form)

    return cell


def _figure(name: str) -> Callable[[Any], str]:
    return lambda row: phrases.number(getattr(row, name))


def _bits_left(row: TensorLook) -> str:
    if row.infinities:
        return f"{row.headroom:.1f} ({row.infinities} inf)"
    return f"{row.headroom:.1f}"


def _suspicion(row: ParameterLook) -> float | None:
    if row.gradient is None:
        return None
    return (row.lost or 0.0) + row.gradient_zeros + min(row.ratio or 0.0, 1.0)


# A largest value this many bits below the limit is worth a colour: it may double three times
# Updates above this share of the weight are larger than stable training makes
KINDS = (
    Kind(
        part="tensors",
        title="Room left in the dtype, least first",
        cells={
            "module": lambda row: row.module or "(outside modules)",
            "direction": attrgetter("stage"),
            "dtype": attrgetter("dtype"),
            "largest": _figure("largest"),
            "bits left": _bits_left,
            "zeros": _cell("zeros", ".1%"),
            "subnormal": _cell("subnormal", ".1%"),
        },
        worst=lambda row: None if row.headroom is None else -row.headroom,
        history="bits so far",
        figure=attrgetter("headroom"),
        alarm=4,
        alarming=lambda row: row.headroom < 3.0 or row.infinities,
    ),
    Kind(
        part="parameters",
        title="Updates, the most suspicious first",
        cells={
            "parameter": attrgetter("name"),
            "dtype": attrgetter("dtype"),
            "update/weight": _cell("ratio", ".1e"),
            "lost": _cell("lost"),
            "grad 0": _cell("gradient_zeros"),
            "var 0": _cell("variance_zeros"),
        },
        worst=_suspicion,
        history="so far",
        figure=attrgetter("ratio"),
        alarm=2,
        alarming=lambda row: (row.ratio or 0.0) > 0.1,
    ),
    Kind(
        part="attention",
        title="Attention, largest logit first",
        cells={
            "module": attrgetter("module"),
            "largest logit": _figure("largest_logit"),
            "entropy": _cell("entropy", ".2f"),
            "one key": _cell("collapsed"),
        },
        worst=attrgetter("largest_logit"),
        history="logit so far",
        figure=attrgetter("largest_logit"),
    ),
    Kind(
        part="norms",
        title="Input of normalisation layers, largest first",
        cells={
            "module": attrgetter("module"),
            "dtype": attrgetter("dtype"),
            "scale": _figure("scale"),
            "output 0": _cell("output_zeros"),
        },
        worst=attrgetter("scale"),
        history="scale so far",
        figure=attrgetter("scale"),
    ),
    Kind(
        part="units",
        title="Activations with dead or saturated units",
        cells={
            "module": attrgetter("module"),
            "function": lambda row: row.op.removeprefix("aten."),
            "units": _figure("units"),
            "dead": _cell("dead"),
            "saturated": _cell("saturated"),
        },
        worst=lambda row: max(row.dead, row.saturated) or None,
    ),
)


def look_tables(looks: Sequence[Look], most: int | None) -> list[dict[str, Any]]:
    """Every table of the newest look that has a row: title, headings, rows, name of the history.

    A row has its cells in the order of the headings, the numbers of those that are worth a colour,
    and its history. The heading of the history is empty where there is none.
    """
    tables = []
    for kind in KINDS:
        histories: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        for look in looks:
            for row in getattr(look, kind.part):
                value = kind.figure(row)
                if value is not None and math.isfinite(value):
                    histories.setdefault(_identity(row), []).append((look.step, value))
        present = [row for row in getattr(looks[-1], kind.part) if kind.worst(row) is not None]
        present.sort(key=lambda row: kind.worst(row) or 0.0, reverse=True)
        rows = []
        for row in present[:most]:
            cells = tuple(cell(row) for cell in kind.cells.values())
            warns = (kind.alarm,) if kind.alarming(row) else ()
            # Step of a look and what it measured there.
            history = tuple(histories.get(_identity(row), ()))
            rows.append({"cells": cells, "warns": warns, "history": history})
        if rows:
            table = {"title": kind.title, "headings": tuple(kind.cells), "history": kind.history}
            tables.append({**table, "rows": rows})
    return tables


def _identity(row: Any) -> tuple[str, ...]:
    return tuple(getattr(row, name, "") for name in ("name", "module", "stage", "dtype"))


# --- Show the deep looks of a run: worst first, and how each figure moved over the run.


MOST_LISTED = 12
"""Rows of each table; `--all` shows every one, `--json` has everything."""
MOST_DRAWN = 16
"""Values that a line of blocks shows, the newest."""


def paint_looks(looks: Sequence[Look], console: Console, *, most: int | None = MOST_LISTED) -> None:
    """Print the newest look, and the history of what it shows."""
    console.print(Text(headline(looks)))
    for table in look_tables(looks, most):
        rows: list[tuple[RenderableType, ...]] = []
        for row in table["rows"]:
            # names are cut in the middle already; numbers line up on the right
            cells = [Text(middle(row["cells"][0], 38))]
            for number, words in enumerate(row["cells"][1:], start=1):
                cells.append(Text(words, style="bold red" if number in row["warns"] else ""))
            values = [value for _, value in row["history"][-MOST_DRAWN:]]
            rows.append((*cells, phrases.sparkline(values) if len(values) > 1 else ""))
        console.print()
        console.print(Text(f" {table['title']}", style="bold"))
        headings = (*table["headings"], table["history"])
        console.print(screen.table(rows, headings, first="", numbers_from=1))
    for sentence in remarks(looks[-1]):
        console.print(Text(f"- {sentence}"))


def why_none(run: Run) -> str:
    """Why a run has no looks, as far as its journal says."""
    config = run.header.get("config")
    probes = config.get("probes") if isinstance(config, dict) else None
    if isinstance(probes, dict) and probes.get("look_every", "") is None:
        return "Probes(look_every=None)"
    for note in reversed(run.notes):
        if note.type == "no_look" or note.kind == "look":
            return f"{note.fields.get('reason')} (step {note.step})"
    if len(run.steps) < 3:
        return (
            f"it has {phrases.count(len(run.steps), 'step')}, and the first probe is at the third"
        )
    return "none of the steps at which one was due was committed"


def headline(looks: Sequence[Look]) -> str:
    """How often was the run looked at?"""
    times = "once" if len(looks) == 1 else f"{len(looks)} times"
    steps = phrases.first_few([look.step for look in looks], 12)
    return f"probed {times}, at step {steps}; the newest took {looks[-1].seconds:.2f} s"


def remarks(look: Look) -> list[str]:
    """What else the look has seen, in sentences."""
    facts = look.facts
    said = []
    if facts.labels and facts.ignored:
        share = facts.ignored / facts.labels
        said.append(f"{share:.0%} of {facts.labels:,} targets are ignored by the loss")
    if facts.softmax_twice:
        said.append("the logits of the cross entropy are probabilities already")
    if not facts.training:
        said.append("the model is in evaluation mode")
    elif facts.dropout:
        names = phrases.first_few(facts.dropout, 4)
        said.append(f"dropout in evaluation mode while the model trains: {names}")
    if facts.kept_gradients:
        said.append("the step started with the previous step's gradients")
    if facts.repeats:
        said.append(f"the batch is the same as in {phrases.count(facts.repeats, 'earlier probe')}")
    missing = [one.name for one in look.parameters if one.trainable and not one.owned]
    if missing:
        said.append(f"no optimizer updates {phrases.first_few(missing, 4)}")
    if look.left_out:
        said.append(f"{phrases.count(look.left_out, 'row')} dropped from the record")
    return said
