"""Values of tensors that are not dense float32, and the exact finite test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stepguard.tensors.values import dense_real, dense_values, elements, is_finite, is_lazy

INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, NAN]),
        torch.tensor([1.0, INF, -INF]),
        torch.tensor([INF], dtype=torch.float16),
        torch.tensor([1.0, NAN]).to(torch.float8_e5m2),
        torch.tensor([complex(0.0, INF)]),
        torch.sparse_coo_tensor([[0]], [NAN], (3,), check_invariants=True),
        nn.Parameter(torch.tensor([NAN])),
    ],
)
def test_one_bad_element_makes_a_tensor_non_finite(tensor: Tensor) -> None:
    assert not is_finite(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.tensor([3, 4]),
        torch.tensor([True]),
        torch.empty(0),
        torch.empty(2, device="meta"),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True),
        nn.LazyLinear(2).weight,
    ],
)
def test_finite_and_unreadable_tensors_pass(tensor: Tensor) -> None:
    assert is_finite(tensor)


def test_a_sum_that_overflows_does_not_make_finite_elements_bad() -> None:
    largest = torch.finfo(torch.float16).max
    assert is_finite(torch.full((64,), largest, dtype=torch.float16))
    assert is_finite(torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64))


def test_an_uncoalesced_gradient_is_judged_by_its_sums() -> None:
    largest = torch.finfo(torch.float32).max
    gradient = torch.sparse_coo_tensor([[1, 1]], [largest, largest], (3,), check_invariants=True)
    assert not is_finite(gradient)


def test_plain_tensors_are_returned_as_they_are() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert dense_real(weight) is weight
    assert dense_values(weight) is weight


def test_complex_numbers_become_pairs() -> None:
    assert dense_real(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]


def test_a_lazy_parameter_has_no_elements_yet() -> None:
    weight = nn.LazyLinear(2).weight
    assert is_lazy(weight)
    assert elements(weight) == 0
    assert elements(torch.ones(2, 3)) == 6
