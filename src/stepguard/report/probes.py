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

from stepguard.records.probes import Look, ParameterLook, WhatIf
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
    """How one kind of row is shown."""

    part: str
    """Field of `Look`."""
    title: str
    columns: str
    """`heading=field:format, ...`; the first one names the row."""
    worst: Callable[[Any], float | None]
    """The largest comes first; None is not shown."""
    history: str = ""
    """Heading of the history, and the field that it shows."""
    figure: str = ""
    alarm: int = 0
    """Number of the cell that is coloured where `alarming` says so."""
    alarming: Callable[[Any], bool] = lambda row: False


def _cell(row: Any, column: str) -> str:
    name, _, form = column.rpartition("=")[2].partition(":")
    value = getattr(row, name)
    if value is None:
        return "-"
    if isinstance(value, str):
        return value.removeprefix("aten.") or "(outside modules)"
    if not form:
        return phrases.number(value)
    if name == "headroom" and row.infinities:
        return f"{value:{form}} ({row.infinities} inf)"
    return format(value, form)


def _suspicion(row: ParameterLook) -> float | None:
    if row.gradient is None:
        return None
    return (row.lost or 0.0) + row.gradient_zeros + min(row.ratio or 0.0, 1.0)


KINDS = (
    Kind(
        "tensors",
        "Room left in the dtype, least first",
        "module=module, direction=stage, dtype=dtype, largest=largest, bits left=headroom:.1f, "
        "zeros=zeros:.1%, subnormal=subnormal:.1%",
        worst=lambda row: None if row.headroom is None else -row.headroom,
        history="bits so far",
        figure="headroom",
        alarm=4,
        # so few bits below the limit it may double three times
        alarming=lambda row: row.headroom < 3.0 or row.infinities,
    ),
    Kind(
        "parameters",
        "Updates, the most suspicious first",
        "parameter=name, dtype=dtype, update/weight=ratio:.1e, lost=lost:.0%, "
        "grad 0=gradient_zeros:.0%, var 0=variance_zeros:.0%",
        worst=_suspicion,
        history="so far",
        figure="ratio",
        alarm=2,
        # stable training makes updates of a thousandth of the weight
        alarming=lambda row: (row.ratio or 0.0) > 0.1,
    ),
    Kind(
        "attention",
        "Attention, largest logit first",
        "module=module, largest logit=largest_logit, entropy=entropy:.2f, one key=collapsed:.0%",
        worst=attrgetter("largest_logit"),
        history="logit so far",
        figure="largest_logit",
    ),
    Kind(
        "norms",
        "Input of normalisation layers, largest first",
        "module=module, dtype=dtype, scale=scale, output 0=output_zeros:.0%",
        worst=attrgetter("scale"),
        history="scale so far",
        figure="scale",
    ),
    Kind(
        "units",
        "Activations with dead or saturated units",
        "module=module, function=op, units=units, dead=dead:.0%, saturated=saturated:.0%",
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
        columns = kind.columns.split(", ")
        # step of a look and what it measured there
        histories: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        for look in looks if kind.figure else ():
            for row in getattr(look, kind.part):
                value = getattr(row, kind.figure)
                if value is not None and math.isfinite(value):
                    histories.setdefault(_identity(row), []).append((look.step, value))
        present = [row for row in getattr(looks[-1], kind.part) if kind.worst(row) is not None]
        present.sort(key=lambda row: kind.worst(row) or 0.0, reverse=True)
        rows = []
        for row in present[:most]:
            cells = tuple(_cell(row, column) for column in columns)
            warns = (kind.alarm,) if kind.alarming(row) else ()
            history = tuple(histories.get(_identity(row), ()))
            rows.append({"cells": cells, "warns": warns, "history": history})
        if rows:
            headings = tuple(column.partition("=")[0] for column in columns)
            table = {"title": kind.title, "headings": headings, "history": kind.history}
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
