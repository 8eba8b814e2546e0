"""Columns of a page: exact, with every value that is not finite, and small."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stepguard.report.page import (
    FINITE,
    MINUS_INF,
    MISSING,
    NAN,
    PLUS_INF,
    dense,
    narrowed,
    packed,
    packed_columns,
    plain_columns,
)
from stepguard.report.story import Series, StepTable

LARGEST_PAGE = 6_000_000


def unpacked(column: dict[str, Any]) -> NDArray[Any]:
    """What `data.js` does."""
    dtype = np.dtype(column["type"]).newbyteorder("<")
    data = zlib.decompress(base64.b64decode(column["data"]))
    by_place = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(by_place.T).reshape(-1).view(dtype)


def table(count: int, **series: NDArray[np.float64]) -> StepTable:
    rows = np.arange(count)
    made = {name: Series(name, rows, values) for name, values in series.items()}
    yes = np.ones(count, np.bool_)
    zeros = np.zeros(count, np.int64)
    return StepTable(
        step=rows,
        committed=yes,
        kept=yes,
        attempt=zeros,
        branch=zeros,
        incident=zeros - 1,
        calibration=~yes,
        series=made,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_column_is_read_back_to_the_last_bit(dtype: type[Any]) -> None:
    values = (np.random.default_rng(0).normal(size=257) * 100).astype(dtype)
    assert unpacked(packed(values)).tobytes() == values.tobytes()


def test_values_that_are_not_finite_or_missing_keep_their_kind() -> None:
    values = np.array([1.0, np.nan, np.inf, -np.inf])
    found, kinds = dense(Series("loss", np.array([0, 1, 2, 4]), values), 0, 6)
    assert kinds.tolist() == [FINITE, NAN, PLUS_INF, MISSING, MINUS_INF, MISSING]
    assert found.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_rows_from_the_middle_are_those_of_the_series() -> None:
    series = Series("loss", np.array([0, 3, 5]), np.array([1.0, 2.0, 3.0]))
    values, kinds = dense(series, 3, 6)
    assert values.tolist() == [2.0, 0.0, 3.0]
    assert kinds.tolist() == [FINITE, MISSING, FINITE]


def test_only_exact_numbers_are_narrowed() -> None:
    assert narrowed(np.array([0.5, 0.25]), "loss").dtype == np.float32
    assert narrowed(np.array([0.1]), "loss").dtype == np.float64
    assert narrowed(np.array([1e300]), "loss").dtype == np.float64
    assert narrowed(np.array([0.1]), "seconds").dtype == np.float32
    assert narrowed(np.array([1e300]), "seconds").dtype == np.float64


def test_plain_rows_leave_out_what_no_row_has() -> None:
    made = table(4, loss=np.array([1.0, 2.0, np.nan, 3.0]))
    states = np.zeros(4, np.uint8)
    columns = plain_columns(made, ["loss", "scale"], states, 2)
    assert columns["step"]["values"] == [2, 3]
    assert columns["loss"] == {"values": [0.0, 3.0], "kinds": [NAN, FINITE]}
    assert "scale" not in columns


def test_a_hundred_thousand_steps_of_eight_series_stay_below_six_megabytes() -> None:
    count = 100_000
    noise = np.random.default_rng(0)
    series = {}
    for place in range(7):
        values = noise.lognormal(size=count).astype(np.float32).astype(np.float64)
        series[f"followed/{place}"] = values
    series["lr"] = 1e-3 * (1 + np.cos(np.linspace(0, np.pi, count)))
    made = table(count, **series)
    columns = packed_columns(made, list(series), np.zeros(count, np.uint8))
    assert sum(len(column["data"]) for column in columns.values()) < LARGEST_PAGE - 200_000
