"""Values of a piece of memory, in every element type."""

from __future__ import annotations

import math

import pytest
import torch

from stepguard.check.scan import Squares, Values


def memory_of(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_range_is_that_of_the_finite_values(dtype: str) -> None:
    numbers = torch.linspace(-1.5, 2.5, 333).to(getattr(torch, dtype))
    numbers[5] = float("nan")
    numbers[9] = float("-inf")
    memory = memory_of(numbers)
    values = Values(0, len(memory), dtype, 0)
    values.update(memory, 0, len(memory))
    assert (values.count, values.nan, values.positive, values.negative) == (333, 1, 0, 1)
    assert (values.low, values.high, values.first, values.largest) == (-1.5, 2.5, 5, 2.5)


def test_complex_numbers_are_counted_once() -> None:
    memory = memory_of(torch.tensor([1 + 2j, complex(0, math.inf), 3 - 4j]))
    values = Values(0, len(memory), "complex64", 0)
    values.update(memory, 0, len(memory))
    assert (values.count, values.positive, values.first) == (3, 1, 1)
    assert (values.low, values.high) == (-4.0, 3.0)


def test_range_of_several_pieces_is_that_of_all_of_them() -> None:
    values = Values(0, 4, "float8_e5m2", 0)
    for number in range(2):
        piece = torch.tensor([1.0, -2.0 - number]).to(torch.float8_e5m2)
        values.update(memory_of(piece), 0, 2)
    assert (values.low, values.high, values.count) == (-3.0, 1.0, 4)


def test_values_that_are_all_bad_have_no_magnitude() -> None:
    memory = memory_of(torch.tensor([math.nan]))
    values = Values(0, 4, "float32", 0)
    values.update(memory, 0, 4)
    assert values.largest == 0.0 and values.bad == 1


def test_sum_of_squares_leaves_out_what_is_not_finite() -> None:
    memory = memory_of(torch.tensor([3.0, math.nan, -4.0, math.inf]))
    values = Squares(0, len(memory), "float32", 0)
    values.update(memory, 0, len(memory))
    assert values.squares == 25.0
