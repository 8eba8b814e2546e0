"""The deep looks of a run as tables of plain words: worst first, with the history of one figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stepguard.records.look import Look, ParameterLook, TensorLook
from stepguard.report import phrases

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
            _share(row.lost),
            _share(row.gradient_zeros),
            _share(row.variance_zeros),
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


def _share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}"
