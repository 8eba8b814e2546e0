"""Columns of a page: exact, with every value that is not finite, and small."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from report.literals import Written, step_line, told
from stepguard.report.page import (
    DROPPED,
    FINITE,
    MINUS_INF,
    MISSING,
    NAN,
    PLUS_INF,
    columns,
    packed,
)

LARGEST_PAGE = 6_000_000


def unpacked(column: dict[str, Any]) -> NDArray[Any]:
    """What `data.js` does."""
    dtype = np.dtype(column["type"]).newbyteorder("<")
    data = zlib.decompress(base64.b64decode(column["data"]))
    by_place = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(by_place.T).reshape(-1).view(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_column_is_read_back_to_the_last_bit(dtype: type[Any]) -> None:
    values = (np.random.default_rng(0).normal(size=257) * 100).astype(dtype)
    column = packed(values, np.zeros(257, np.uint8))
    assert unpacked(column).tobytes() == values.tobytes()
    assert "kinds" not in column


def test_values_that_are_not_finite_or_missing_keep_their_kind() -> None:
    losses = [1.0, np.nan, np.inf, None, -np.inf, None]
    steps = [step_line(step, loss, committed=step != 1) for step, loss in enumerate(losses)]
    found = columns(told(Written(steps=steps)))
    values, kinds = found["loss"]
    assert kinds.tolist() == [FINITE, NAN, PLUS_INF, MISSING, MINUS_INF, MISSING]
    assert values.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert found["state"][0].tolist() == [0, DROPPED, 0, 0, 0, 0]


def test_rows_from_the_middle_leave_out_what_none_of_them_has() -> None:
    steps = [step_line(0, 1.0, scale=2.0), step_line(1, 2.0), step_line(2, np.nan), step_line(3)]
    found = columns(told(Written(steps=steps)), 2)
    assert found["step"][0].tolist() == [2, 3]
    assert found["loss"][0].tolist() == [0.0, 1.0]
    assert found["loss"][1].tolist() == [NAN, FINITE]
    assert "scale" not in found


def test_a_hundred_thousand_steps_of_eight_series_stay_below_six_megabytes() -> None:
    count = 100_000
    noise = np.random.default_rng(0)
    drawn = [noise.lognormal(size=count).astype(np.float32).astype(np.float64) for _ in range(7)]
    drawn.append(1e-3 * (1 + np.cos(np.linspace(0, np.pi, count))))
    finite = np.zeros(count, np.uint8)
    sizes = [len(packed(values, finite)["data"]) for values in drawn]
    assert sum(sizes) < LARGEST_PAGE - 200_000
