"""Names and values of tensors, marks of in-place writes, and wrappers that go away again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepguard.tensors.names import (
    named_buffers,
    named_modules,
    named_parameters,
    parameter_names,
    wrap,
)
from stepguard.tensors.values import (
    is_finite,
    versions,
    written_since,
)

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


def test_only_tensors_written_in_place_are_listed() -> None:
    kept = torch.zeros(2)
    changed = torch.zeros(2)
    marks = versions([kept, changed])
    assert written_since([kept, changed], marks) == []
    changed.add_(1.0)
    assert [t is changed for t in written_since([kept, changed], marks)] == [True]


# --- names


def test_names_carry_the_prefix_of_their_root() -> None:
    roots = {"": nn.Sequential(nn.BatchNorm1d(2)), "criterion": nn.Linear(2, 1, bias=False)}
    parameters = [name for name, _ in named_parameters(roots)]
    buffers = [name for name, _ in named_buffers(roots)]
    modules = [name for name, _ in named_modules(roots)]
    assert parameters == ["0.weight", "0.bias", "criterion.weight"]
    assert buffers == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert modules == ["", "0", "criterion"]


def test_a_parameter_outside_every_module_is_named_by_its_group() -> None:
    model = nn.Linear(1, 1, bias=False)
    loose = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [loose]}], lr=0.1)
    names = [name for _, name in parameter_names({"": model}, optimizer)]
    assert names == ["weight", "group1[0]"]


# --- wrappers


class Counter:
    def count(self) -> int:
        return 1


def plus_one(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: original(*args) + 1


def test_wrapping_an_instance_leaves_nothing_behind() -> None:
    counter = Counter()
    with ExitStack() as undo:
        wrap(undo, counter, "count", plus_one)
        assert counter.count() == 2
    assert counter.count() == 1
    assert "count" not in vars(counter)


def test_wrapping_a_class_puts_its_own_method_back() -> None:
    before = vars(Counter)["count"]
    with ExitStack() as undo:
        wrap(undo, Counter, "count", plus_one)
        assert Counter().count() == 2
    assert vars(Counter)["count"] is before


def test_a_later_wrapper_is_not_thrown_away() -> None:
    counter = Counter()
    with ExitStack() as undo:
        wrap(undo, counter, "count", plus_one)
        later = plus_one(counter.count)
        counter.count = later  # type: ignore[method-assign]
    assert counter.count is later
