"""Statistics of single tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepguard.probes.statistics import (
    SAMPLE,
    Numbers,
    bits_between,
    rounded_to_zero,
    sampled,
    statistics_of,
)

HALF = torch.finfo(torch.float16)


def numbers_of(tensor: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in statistics_of(tensor).items()}


def test_extremes_and_shares_are_counted() -> None:
    found = numbers_of(torch.tensor([0.0, -4.0, 0.5, 1e-40]))
    assert found["largest"] == 4.0
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
    assert statistics_of(torch.arange(3)) == {}
    assert statistics_of(torch.zeros(0)) == {}


def test_bits_are_those_of_the_dtype() -> None:
    assert bits_between(HALF.max, 65504.0) == 0.0
    assert bits_between(HALF.max, 65504.0 / 8) == pytest.approx(3.0)
    assert bits_between(HALF.max, 0.0) is None
    assert bits_between(2.0**-14, HALF.tiny) == 0.0
    assert bits_between(math.inf, HALF.tiny) is None


def test_values_that_a_conversion_rounds_away_are_counted() -> None:
    wide = torch.tensor([1e-9, 1.0, 0.0])
    assert int(rounded_to_zero(wide, wide.half())) == 1


def test_measurements_are_read_back_by_kind_and_in_order() -> None:
    numbers = Numbers()
    numbers.add("size", {"of": "a"}, low=torch.tensor(1.0), high=torch.tensor(2))
    numbers.add("counts", {}, counts=torch.tensor([3, 4]))
    numbers.add("size", {"of": "b"}, low=torch.tensor(True))
    rows = numbers.read()
    assert rows["size"] == [{"of": "a", "low": 1.0, "high": 2.0}, {"of": "b", "low": 1.0}]
    assert rows["counts"] == [{"counts": [3.0, 4.0]}]
    assert Numbers().read() == {}
