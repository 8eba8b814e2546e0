"""Numbers on a tensor: extremes and counts of the finite part, and the element that is shown."""

from __future__ import annotations

import math

import pytest
import torch

from stepguard.locate import operands
from stepguard.locate.operands import (
    broadcast_index,
    broadcasts,
    element,
    first_broken,
    of_number,
    summarise,
    unravel,
)

INF = math.inf


def test_summary_counts_kinds_and_bounds_the_finite_part() -> None:
    tensor = torch.tensor([[0.0, 2.0, math.nan], [-3.0, INF, -INF]])
    operand = summarise("self", tensor)
    assert (operand.min, operand.max, operand.zeros) == (-3.0, 2.0, 1)
    assert (operand.nan, operand.posinf, operand.neginf) == (1, 1, 1)
    assert operand.index == (0, 2)
    assert operand.value is not None and math.isnan(operand.value)


def test_summary_of_a_clean_tensor_shows_the_element_asked_for() -> None:
    operand = summarise("self", torch.tensor([1.0, 5.0]), (1,))
    assert (operand.index, operand.value, operand.nan) == ((1,), 5.0, 0)


def test_summary_of_integers_and_of_nothing_finite() -> None:
    operand = summarise("indices", torch.tensor([0, 4, 7]))
    assert (operand.min, operand.max, operand.zeros, operand.dtype) == (0.0, 7.0, 1, "int64")
    operand = summarise("self", torch.tensor([math.nan]))
    assert (operand.min, operand.max) == (None, None)


@pytest.mark.parametrize(
    ("value", "shown"), [(complex(1.0, INF), INF), (complex(-INF, 1.0), -INF), (3 + 4j, 5.0)]
)
def test_complex_element_shows_its_bad_part_or_its_magnitude(value: complex, shown: float) -> None:
    assert element(torch.tensor([value]), (0,)) == shown


def test_element_of_another_shape_is_not_guessed() -> None:
    assert element(torch.ones(2, 2), (0,)) is None
    assert element(torch.ones(2).to_sparse(), (0,)) is None


def test_first_broken_position() -> None:
    assert first_broken(torch.tensor([[1.0, 1.0], [INF, math.nan]])) == (1, 0)
    assert first_broken(torch.ones(2)) is None
    assert unravel(5, (2, 3)) == (1, 2)


@pytest.mark.parametrize(
    ("shape", "position"),
    [((2, 3), (1, 2)), ((3,), (2,)), ((2, 1), (1, 0)), ((), ()), ((4, 2, 3), None), ((2,), None)],
)
def test_position_before_a_broadcast(
    shape: tuple[int, ...], position: tuple[int, ...] | None
) -> None:
    assert broadcast_index((1, 2), shape) == position
    if position is not None:
        assert broadcasts(shape, (2, 3))


def test_shape_that_does_not_broadcast() -> None:
    assert not broadcasts((2, 2), (2, 3))
    assert not broadcasts((1, 2, 3), (2, 3))


def test_python_numbers_keep_their_kind() -> None:
    assert (of_number("other", 2).dtype, of_number("other", 0.5).dtype) == ("int", "float")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exponents_count_every_finite_element_but_zeros(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -1.5, 2.0, 0.25, math.inf, math.nan], dtype=dtype)
    assert summarise("x", values).exponents == ((-2, 1), (0, 2), (1, 1))


def test_exponents_of_a_large_tensor_are_those_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "MOST_COUNTED", 100)
    ((exponent, count),) = summarise("x", torch.ones(1000)).exponents
    assert exponent == 0 and count <= 100
