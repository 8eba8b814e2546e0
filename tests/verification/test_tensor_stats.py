"""Statistics of a piece of memory, in every element type."""

from __future__ import annotations

import math

import pytest
import torch

from stepguard.verification import bounded_file
from stepguard.verification.bounded_file import PieceStatistics, statistics_of


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_range_is_that_of_the_finite_values(dtype: str) -> None:
    values = torch.linspace(-1.5, 2.5, 333).to(getattr(torch, dtype))
    values[5] = float("nan")
    values[9] = float("-inf")
    found = statistics_of(values, dtype)
    assert found == PieceStatistics(333, -1.5, 2.5, nan=1, negative=1, first=5)


def test_complex_numbers_are_counted_once() -> None:
    values = torch.tensor([1 + 2j, complex(0, math.inf), 3 - 4j], dtype=torch.complex64)
    found = statistics_of(torch.view_as_real(values).flatten(), "complex64")
    assert (found.count, found.positive, found.first) == (3, 1, 1)
    assert (found.low, found.high) == (-4.0, 3.0)


def test_extremes_of_pieces_are_those_of_their_values() -> None:
    extremes = bounded_file.Extremes("float8_e5m2", 2)
    for number in range(2):
        extremes.add(number, torch.tensor([1.0, -2.0 - number]).to(torch.float8_e5m2))
    assert extremes.bounds() == [(-2.0, 1.0), (-3.0, 1.0)]


def test_sum_of_squares_leaves_out_what_is_not_finite() -> None:
    assert bounded_file.squares(torch.tensor([3.0, math.nan, -4.0, math.inf])) == 25.0
