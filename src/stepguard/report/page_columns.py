"""The numbers of a run, packed for a web page: exact, small, and quick to read there.

A column is one number a row. Its bytes are put in the order of their significance, which lets
deflate find what repeats, and written as base64. Numbers that single precision holds exactly, as
those of torch mostly are, take four bytes, others eight. Values that are not finite, and rows
without a value, are told by a second column of kinds.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepguard.report.story import Series, StepTable

FINITE, NAN, PLUS_INF, MINUS_INF, MISSING = range(5)
"""Kinds of a value, as the page's `data.js` knows them."""
ROUNDED = ("seconds", "grad_norm_clipped")
"""Series that are kept in single precision: a clock's noise, and a product."""
DROPPED, CALIBRATION, PARTIAL = range(1, 4)
"""Kinds of an update that was not an ordinary one."""

Column = dict[str, Any]


def packed(values: NDArray[Any], kinds: NDArray[np.uint8] | None = None) -> Column:
    """A column as the page reads it."""
    column: Column = {"type": f"{values.dtype.kind}{values.dtype.itemsize}"}
    column["data"] = _deflated(_by_significance(values))
    if kinds is not None and kinds.any():
        column["kinds"] = _deflated(kinds.tobytes())
    return column


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _by_significance(values: NDArray[Any]) -> bytes:
    width = values.dtype.itemsize
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    return little.view(np.uint8).reshape(-1, width).T.tobytes()


def dense(series: Series, first: int, end: int) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """The values of rows `first` to `end`, and their kinds; what is not finite is 0 there."""
    values = np.zeros(end - first)
    kinds = np.full(end - first, MISSING, np.uint8)
    low, high = np.searchsorted(series.rows, [first, end])
    rows = series.rows[low:high] - first
    found = series.values[low:high]
    kinds[rows] = kinds_of(found)
    values[rows] = np.where(np.isfinite(found), found, 0.0)
    return values, kinds


def kinds_of(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Which values are finite, and which not in what way."""
    kinds = np.full(len(values), FINITE, np.uint8)
    kinds[np.isnan(values)] = NAN
    kinds[values == np.inf] = PLUS_INF
    kinds[values == -np.inf] = MINUS_INF
    return kinds


def narrowed(values: NDArray[np.float64], name: str) -> NDArray[Any]:
    """In single precision where that loses nothing that was measured."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    exact = np.array_equal(narrow.astype(np.float64), values)
    if exact or (name in ROUNDED and np.isfinite(narrow).all()):
        return narrow
    return values


def update_states(table: StepTable, partial: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """What became of the update of each row; 0 is an ordinary one."""
    states = np.zeros(len(table), np.uint8)
    states[table.dropped] = DROPPED
    states[table.calibration] = CALIBRATION
    states[partial & table.committed] = PARTIAL
    return states


def packed_columns(table: StepTable, names: list[str], states: NDArray[np.uint8]) -> dict[str, Any]:
    """All columns of a run, by name."""
    columns = {"step": packed(table.step.astype(np.float64)), "state": packed(states)}
    for name in names:
        values, kinds = dense(table.column(name), 0, len(table))
        columns[name] = packed(narrowed(values, name), kinds)
    return columns


def plain_columns(
    table: StepTable, names: list[str], states: NDArray[np.uint8], first: int
) -> dict[str, Any]:
    """The rows from `first` on as plain lists, for the few that come at a time."""
    columns: dict[str, Any] = {
        "step": {"values": table.step[first:].tolist()},
        "state": {"values": states[first:].tolist()},
    }
    for name in names:
        values, kinds = dense(table.column(name), first, len(table))
        if (kinds == MISSING).all():
            continue
        columns[name] = {"values": values.tolist()}
        if kinds.any():
            columns[name]["kinds"] = kinds.tolist()
    return columns
