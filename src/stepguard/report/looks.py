"""Show the deep looks of a run: worst first, and how each figure moved over the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepguard.records.look import Look, ParameterLook, StepFacts, TensorLook
from stepguard.report import phrases
from stepguard.report.unbroken import middle

MOST_LISTED = 12
"""Rows of each table; `--all` shows every one, `--json` has everything."""
LONGEST_NAME = 38
FEW_BITS = 3.0
"""A largest value this many bits below the limit is worth a colour: it may double three times."""
STABLE_RATIO = 0.1
"""Updates above this share of the weight are larger than stable training makes."""


Row = TypeVar("Row")


def paint(looks: Sequence[Look], console: Console, *, most: int | None = MOST_LISTED) -> None:
    """Print the newest look, and the history of what it shows."""
    newest = looks[-1]
    times = "once" if len(looks) == 1 else f"{len(looks)} times"
    steps = phrases.first_few([look.step for look in looks], 12)
    text = f"looked {times}, at step {steps}; the newest took {newest.seconds:.2f} s"
    console.print(Text(text))
    for table in (
        _ranges(looks, most),
        _updates(looks, most),
        _attention(looks, most),
        _norms(looks, most),
        _units(looks, most),
    ):
        if table.row_count:
            console.print()
            console.print(table)
    for sentence in remarks(newest):
        console.print(Text(f"- {sentence}"))


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


def _ranges(looks: Sequence[Look], most: int | None) -> Table:
    table = _table(
        "Room left in the dtype, least first",
        (
            "module",
            "direction",
            "dtype",
            "largest",
            "bits left",
            "zeros",
            "subnormal",
            "bits so far",
        ),
    )
    history = _history(looks, lambda look: look.tensors, _range_key, lambda row: row.headroom)
    rows = [row for row in looks[-1].tensors if row.headroom is not None]
    for row in rows[:most]:
        bits = Text(f"{row.headroom:.1f}")
        if row.headroom is not None and row.headroom < FEW_BITS:
            bits.stylize("bold red")
        if row.infinities:
            bits.append(f" ({row.infinities} inf)", style="bold red")
        table.add_row(
            Text(middle(row.module or "(outside modules)", LONGEST_NAME)),
            row.stage,
            row.dtype,
            phrases.number(row.largest),
            bits,
            f"{row.zeros:.1%}",
            f"{row.subnormal:.1%}",
            _trend(history.get(_range_key(row), ())),
        )
    return table


def _range_key(row: TensorLook) -> tuple[str, ...]:
    return (row.module, row.stage, row.dtype)


def _updates(looks: Sequence[Look], most: int | None) -> Table:
    table = _table(
        "Updates, the most suspicious first",
        ("parameter", "dtype", "update / weight", "lost", "gradient 0", "variance 0", "so far"),
    )
    history = _history(
        looks, lambda look: look.parameters, lambda row: (row.name,), lambda row: row.ratio
    )
    rows = [row for row in looks[-1].parameters if row.gradient is not None]
    for row in sorted(rows, key=_suspicion, reverse=True)[:most]:
        ratio = Text("-" if row.ratio is None else f"{row.ratio:.1e}")
        if row.ratio is not None and row.ratio > STABLE_RATIO:
            ratio.stylize("bold red")
        table.add_row(
            Text(middle(row.name, LONGEST_NAME)),
            row.dtype,
            ratio,
            _share(row.lost),
            _share(row.gradient_zeros),
            _share(row.variance_zeros),
            _trend(history.get((row.name,), ())),
        )
    return table


def _suspicion(row: ParameterLook) -> float:
    return (row.lost or 0.0) + row.gradient_zeros + min(row.ratio or 0.0, 1.0)


def _attention(looks: Sequence[Look], most: int | None) -> Table:
    table = _table(
        "Attention, largest logit first",
        ("module", "largest logit", "entropy", "one key", "logit so far"),
    )
    history = _history(
        looks, lambda look: look.attention, lambda row: (row.module,), lambda row: row.largest_logit
    )
    rows = sorted(looks[-1].attention, key=lambda row: -row.largest_logit)
    for row in rows[:most]:
        table.add_row(
            Text(middle(row.module, LONGEST_NAME)),
            phrases.number(row.largest_logit),
            f"{row.entropy:.2f}",
            f"{row.collapsed:.0%}",
            _trend(history.get((row.module,), ())),
        )
    return table


def _norms(looks: Sequence[Look], most: int | None) -> Table:
    table = _table(
        "Input of normalisation layers, largest first",
        ("module", "dtype", "scale", "output 0", "scale so far"),
    )
    history = _history(
        looks, lambda look: look.norms, lambda row: (row.module,), lambda row: row.scale
    )
    rows = sorted(looks[-1].norms, key=lambda row: -row.scale)
    for row in rows[:most]:
        table.add_row(
            Text(middle(row.module, LONGEST_NAME)),
            row.dtype,
            phrases.number(row.scale),
            f"{row.output_zeros:.0%}",
            _trend(history.get((row.module,), ())),
        )
    return table


def _units(looks: Sequence[Look], most: int | None) -> Table:
    table = _table(
        "Activations with dead or saturated units",
        ("module", "function", "units", "dead", "saturated"),
    )
    rows = [row for row in looks[-1].units if row.dead or row.saturated]
    for row in sorted(rows, key=lambda row: -max(row.dead, row.saturated))[:most]:
        table.add_row(
            Text(middle(row.module, LONGEST_NAME)),
            row.op.removeprefix("aten."),
            str(row.units),
            f"{row.dead:.0%}",
            f"{row.saturated:.0%}",
        )
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), title_style="bold")
    for position, heading in enumerate(headings):
        # names are cut in the middle already; numbers line up on the right
        table.add_column(heading, justify="left" if position == 0 else "right", no_wrap=True)
    return table


def _history(
    looks: Sequence[Look],
    rows: Callable[[Look], Sequence[Row]],
    key: Callable[[Row], tuple[str, ...]],
    value: Callable[[Row], float | None],
) -> dict[tuple[str, ...], list[float]]:
    """Figure of each thing, look by look."""
    found: dict[tuple[str, ...], list[float]] = {}
    for look in looks:
        for row in rows(look):
            number = value(row)
            if number is not None and math.isfinite(number):
                found.setdefault(key(row), []).append(number)
    return found


def _trend(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    return phrases.sparkline(values[-16:])


def _share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}"
