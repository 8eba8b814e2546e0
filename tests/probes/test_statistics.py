"""Statistics of single tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepguard.probes.statistics import (
    FIELDS,
    SAMPLE,
    Numbers,
    bits_above_floor,
    bits_of_headroom,
    rounded_to_zero,
    sampled,
    vector_of,
)


def numbers_of(tensor: Tensor) -> dict[str, float]:
    vector = vector_of(tensor)
    assert vector is not None
    return dict(zip(FIELDS, vector.tolist(), strict=True))


def test_extremes_and_shares_are_counted() -> None:
    found = numbers_of(torch.tensor([0.0, -4.0, 0.5, 1e-40]))
    assert (found["largest"], found["lowest"], found["elements"]) == (4.0, -4.0, 4.0)
    assert (found["zeros"], found["subnormal"], found["infinities"]) == (1.0, 1.0, 0.0)
    assert found["smallest"] == pytest.approx(1e-40, rel=1e-4)


def test_infinity_is_counted_and_the_largest_finite_value_kept() -> None:
    found = numbers_of(torch.tensor([torch.inf, 3.0, -torch.inf]))
    assert (found["largest"], found["infinities"]) == (3.0, 2.0)


def test_the_largest_value_of_a_long_tensor_is_found_wherever_it_is() -> None:
    values = torch.ones(5 * SAMPLE)
    values[3] = 1000.0
    assert sampled(values).numel() <= SAMPLE
    assert numbers_of(values)["largest"] == 1000.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_has_numbers(dtype: torch.dtype) -> None:
    assert numbers_of(torch.tensor([2.0, 0.0], dtype=dtype))["largest"] == 2.0


def test_eight_bit_floats_have_numbers() -> None:
    assert numbers_of(torch.tensor([2.0]).to(torch.float8_e4m3fn))["largest"] == 2.0


def test_integers_and_empty_tensors_have_none() -> None:
    assert vector_of(torch.arange(3)) is None
    assert vector_of(torch.zeros(0)) is None


def test_bits_are_those_of_the_dtype() -> None:
    assert bits_of_headroom(65504.0, torch.float16) == 0.0
    assert bits_of_headroom(65504.0 / 8, torch.float16) == pytest.approx(3.0)
    assert bits_of_headroom(0.0, torch.float16) is None
    assert bits_above_floor(2.0**-14, torch.float16) == 0.0
    assert bits_above_floor(math.inf, torch.float16) is None


def test_values_that_a_conversion_rounds_away_are_counted() -> None:
    wide = torch.tensor([1e-9, 1.0, 0.0])
    assert rounded_to_zero(wide, wide.half()).tolist() == [1.0, 3.0]


def test_vectors_are_read_back_in_order() -> None:
    numbers = Numbers()
    assert numbers.add(torch.tensor([1.0, 2.0])) == 0
    assert numbers.add(torch.tensor([3.0])) == 1
    assert numbers.read() == [[1.0, 2.0], [3.0]]
    assert Numbers().read() == []
