"""The deep looks of a run as tables of plain words: worst first, with the history of one figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stepguard.records.probes import (
    Look,
    ParameterLook,
    StepFacts,
    TensorLook,
    TrialOutcome,
    WhatIf,
)
from stepguard.report import phrases
from stepguard.report._random import same_random_numbers
from stepguard.report.screen import CleanConsole, draw, is_tty, middle, put, takes_unicode
from stepguard.report.story import Run

# --- Show what would have helped: a table of the candidates, the best first, and what to change.


MOST_POINTS = 16
"""Losses of a trial that are drawn, the last ones."""
MUCH = 10.0
Told = Callable[[int, int, str], None]


def show(found: WhatIf, stream: TextIO) -> None:
    """Print the table."""
    plain = not takes_unicode(stream)
    put(draw(stream, lambda console: paint_trials(found, console, plain=plain)), stream)


def paint_trials(found: WhatIf, console: Console, *, plain: bool = False) -> None:
    """Draw the table, the best candidate in words, and what to know about the trials."""
    console.print(Text(_heading(found)))
    console.print()
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("what if", overflow="fold")
    table.add_column("bad value", overflow="fold")
    for heading in ("loss", "held out", "weights moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("losses", no_wrap=True)
    for outcome in found.outcomes:
        table.add_row(*_row(outcome, plain=plain))
    console.print(table)
    console.print()
    for sentence in sentences(found):
        console.print(Text(sentence))


def _heading(found: WhatIf) -> str:
    way = "the bad step alone"
    if found.window:
        way = f"{phrases.count(found.window, 'step')} from step {found.first}, then the bad one"
    after = f" and {found.after} after it" if found.after else ""
    return f"what if, before {found.incident}: {way}{after}, once for each ({found.steps} steps)"


def _row(outcome: TrialOutcome, *, plain: bool) -> list[Text | str]:
    label = Text(outcome.label, style="bold" if outcome.works else "")
    if outcome.answers:
        label.append(f" [{', '.join(outcome.answers)}]", style="cyan")
    return [
        label,
        _fate(outcome),
        _number(outcome.loss),
        _number(outcome.held_out),
        _share(outcome.distance),
        phrases.sparkline(outcome.losses[-MOST_POINTS:], plain=plain),
    ]


def _fate(outcome: TrialOutcome) -> Text:
    if outcome.works:
        return Text("does not come back", style="green")
    if outcome.why_not:
        return Text(f"not tried: {outcome.why_not}", style="dim")
    return Text(f"step {outcome.bad_step}: {outcome.bad_value}", style="red")


def _share(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if value < MUCH:
        return f"{value:.1%}"
    return f"{value:.0f} times" if value < 10_000 else f"{value:.0e} times"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return phrases.number(value) if math.isfinite(value) else str(value)


def sentences(found: WhatIf) -> list[str]:
    """What to do, and what to know about the trials."""
    best = found.best
    if best is None:
        told = ["Nothing that was tried helps: the cause is in the code or in all of the data."]
    else:
        told = [f"Best: {best.label}.", f"To change: {best.change}."]
    return told + [f"- {remark}" for remark in found.remarks]


@contextmanager
def progress_bar(stream: TextIO | None) -> Iterator[Told]:
    """Yield what is to be told of the trials; it draws a bar where the stream is a terminal."""
    if stream is None or not is_tty(stream):
        yield lambda done, total, name: None
        return
    columns = (TextColumn("what if"), BarColumn(), TextColumn("{task.description}", markup=False))
    console = CleanConsole(file=stream)
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = progress.add_task("", total=None)

    def tell(done: int, total: int, name: str) -> None:
        # Not before there is something to tell: the user may be asked a question first.
        progress.start()
        progress.update(task, completed=done, total=total, description=name)

    with same_random_numbers():
        try:
            yield tell
        finally:
            progress.stop()


# --- The deep looks of a run as tables of plain words: worst first, with the history of one
# figure.


FEW_BITS = 3.0
"""A largest value this many bits below the limit is worth a colour: it may double three times."""
STABLE_RATIO = 0.1
"""Updates above this share of the weight are larger than stable training makes."""

Row = TypeVar("Row")
History = tuple[tuple[int, float], ...]
"""Step of a look and what it measured there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRow:
    """One thing that was looked at."""

    cells: tuple[str, ...]
    """In the order of the headings, its name first."""
    warns: tuple[int, ...] = ()
    """Numbers of the cells that are worth a colour."""
    history: History = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookTable:
    """One kind of thing, worst first."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[LookRow, ...]
    history: str = ""
    """Heading of the history; empty where there is none."""


def look_tables(looks: Sequence[Look], most: int | None) -> list[LookTable]:
    """Every table that has a row, of the newest look."""
    made = [
        _ranges(looks, most),
        _updates(looks, most),
        _attention(looks, most),
        _norms(looks, most),
        _units(looks, most),
    ]
    return [table for table in made if table.rows]


def _ranges(looks: Sequence[Look], most: int | None) -> LookTable:
    history = _history(looks, lambda look: look.tensors, _range_key, lambda row: row.headroom)
    present = [row for row in looks[-1].tensors if row.headroom is not None]
    rows = []
    for row in present[:most]:
        bits = f"{row.headroom:.1f}"
        if row.infinities:
            bits += f" ({row.infinities} inf)"
        few = row.headroom is not None and row.headroom < FEW_BITS
        cells = (
            row.module or "(outside modules)",
            row.stage,
            row.dtype,
            phrases.number(row.largest),
            bits,
            f"{row.zeros:.1%}",
            f"{row.subnormal:.1%}",
        )
        warns = (4,) if few or row.infinities else ()
        rows.append(LookRow(cells=cells, warns=warns, history=history.get(_range_key(row), ())))
    return LookTable(
        title="Room left in the dtype, least first",
        headings=("module", "direction", "dtype", "largest", "bits left", "zeros", "subnormal"),
        rows=tuple(rows),
        history="bits so far",
    )


def _range_key(row: TensorLook) -> tuple[str, ...]:
    return (row.module, row.stage, row.dtype)


def _updates(looks: Sequence[Look], most: int | None) -> LookTable:
    history = _history(
        looks, lambda look: look.parameters, lambda row: (row.name,), lambda row: row.ratio
    )
    present = [row for row in looks[-1].parameters if row.gradient is not None]
    rows = []
    for row in sorted(present, key=_suspicion, reverse=True)[:most]:
        cells = (
            row.name,
            row.dtype,
            "-" if row.ratio is None else f"{row.ratio:.1e}",
            _look_tables_share(row.lost),
            _look_tables_share(row.gradient_zeros),
            _look_tables_share(row.variance_zeros),
        )
        large = row.ratio is not None and row.ratio > STABLE_RATIO
        warns = (2,) if large else ()
        rows.append(LookRow(cells=cells, warns=warns, history=history.get((row.name,), ())))
    return LookTable(
        title="Updates, the most suspicious first",
        headings=("parameter", "dtype", "update/weight", "lost", "grad 0", "var 0"),
        rows=tuple(rows),
        history="so far",
    )


def _suspicion(row: ParameterLook) -> float:
    return (row.lost or 0.0) + row.gradient_zeros + min(row.ratio or 0.0, 1.0)


def _attention(looks: Sequence[Look], most: int | None) -> LookTable:
    history = _history(
        looks, lambda look: look.attention, lambda row: (row.module,), lambda row: row.largest_logit
    )
    rows = []
    for row in sorted(looks[-1].attention, key=lambda row: -row.largest_logit)[:most]:
        cells = (
            row.module,
            phrases.number(row.largest_logit),
            f"{row.entropy:.2f}",
            f"{row.collapsed:.0%}",
        )
        rows.append(LookRow(cells=cells, history=history.get((row.module,), ())))
    return LookTable(
        title="Attention, largest logit first",
        headings=("module", "largest logit", "entropy", "one key"),
        rows=tuple(rows),
        history="logit so far",
    )


def _norms(looks: Sequence[Look], most: int | None) -> LookTable:
    history = _history(
        looks, lambda look: look.norms, lambda row: (row.module,), lambda row: row.scale
    )
    rows = []
    for row in sorted(looks[-1].norms, key=lambda row: -row.scale)[:most]:
        cells = (row.module, row.dtype, phrases.number(row.scale), f"{row.output_zeros:.0%}")
        rows.append(LookRow(cells=cells, history=history.get((row.module,), ())))
    return LookTable(
        title="Input of normalisation layers, largest first",
        headings=("module", "dtype", "scale", "output 0"),
        rows=tuple(rows),
        history="scale so far",
    )


def _units(looks: Sequence[Look], most: int | None) -> LookTable:
    present = [row for row in looks[-1].units if row.dead or row.saturated]
    rows = []
    for row in sorted(present, key=lambda row: -max(row.dead, row.saturated))[:most]:
        cells = (
            row.module,
            row.op.removeprefix("aten."),
            str(row.units),
            f"{row.dead:.0%}",
            f"{row.saturated:.0%}",
        )
        rows.append(LookRow(cells=cells))
    return LookTable(
        title="Activations with dead or saturated units",
        headings=("module", "function", "units", "dead", "saturated"),
        rows=tuple(rows),
    )


def _history(
    looks: Sequence[Look],
    rows: Callable[[Look], Sequence[Row]],
    key: Callable[[Row], tuple[str, ...]],
    value: Callable[[Row], float | None],
) -> dict[tuple[str, ...], History]:
    """Figure of each thing, look by look."""
    found: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for look in looks:
        for row in rows(look):
            number = value(row)
            if number is not None and math.isfinite(number):
                found.setdefault(key(row), []).append((look.step, number))
    return {name: tuple(points) for name, points in found.items()}


def _look_tables_share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}"


# --- Show the deep looks of a run: worst first, and how each figure moved over the run.


MOST_LISTED = 12
"""Rows of each table; `--all` shows every one, `--json` has everything."""
LONGEST_NAME = 38
FEWEST_STEPS = 3
MOST_DRAWN = 16
"""Looks that a line of blocks shows, the newest."""


def paint_looks(looks: Sequence[Look], console: Console, *, most: int | None = MOST_LISTED) -> None:
    """Print the newest look, and the history of what it shows."""
    console.print(Text(headline(looks)))
    for table in look_tables(looks, most):
        console.print()
        console.print(_painted(table))
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
    if len(run.steps) < FEWEST_STEPS:
        return f"it has {phrases.count(len(run.steps), 'step')}, and the first look is at the third"
    return "none of the steps at which one was due was committed"


def headline(looks: Sequence[Look]) -> str:
    """How often was the run looked at?"""
    times = "once" if len(looks) == 1 else f"{len(looks)} times"
    steps = phrases.first_few([look.step for look in looks], 12)
    return f"looked {times}, at step {steps}; the newest took {looks[-1].seconds:.2f} s"


def remarks(look: Look) -> list[str]:
    """What else the look has seen, in sentences."""
    told = [*_remarks_on_loss(look.facts), *_remarks_on_loop(look.facts)]
    missing = [one.name for one in look.parameters if one.trainable and not one.owned]
    if missing:
        told.append(f"no optimizer updates {phrases.first_few(missing, 4)}")
    if look.left_out:
        told.append(f"{phrases.count(look.left_out, 'row')} left out of the record")
    return told


def _remarks_on_loss(facts: StepFacts) -> list[str]:
    told = []
    if facts.labels and facts.ignored:
        share = facts.ignored / facts.labels
        told.append(f"{share:.0%} of {facts.labels:,} targets are ignored by the loss")
    if facts.softmax_twice:
        told.append("the logits of the cross entropy are probabilities already")
    return told


def _remarks_on_loop(facts: StepFacts) -> list[str]:
    told = []
    if not facts.training:
        told.append("the model is in evaluation mode")
    elif facts.dropout:
        names = phrases.first_few(facts.dropout, 4)
        told.append(f"dropout in evaluation mode while the model trains: {names}")
    if facts.kept_gradients:
        told.append("the step began with the gradients of the one before")
    if facts.repeats:
        told.append(f"the batch is the same as in {phrases.count(facts.repeats, 'earlier look')}")
    return told


def _painted(table: LookTable) -> Table:
    drawn = Table(
        title=table.title, title_justify="left", box=None, padding=(0, 1), title_style="bold"
    )
    headings = table.headings
    if table.history:
        headings = (*headings, table.history)
    for position, heading in enumerate(headings):
        # names are cut in the middle already; numbers line up on the right
        drawn.add_column(heading, justify="left" if position == 0 else "right", no_wrap=True)
    for row in table.rows:
        cells = _cells(row)
        if table.history:
            cells.append(Text(_trend(row)))
        drawn.add_row(*cells)
    return drawn


def _cells(row: LookRow) -> list[Text]:
    cells = [Text(middle(row.cells[0], LONGEST_NAME))]
    for number, words in enumerate(row.cells[1:], start=1):
        cells.append(Text(words, style="bold red" if number in row.warns else ""))
    return cells


def _trend(row: LookRow) -> str:
    values = [value for _, value in row.history[-MOST_DRAWN:]]
    if len(values) < 2:
        return ""
    return phrases.sparkline(values)
