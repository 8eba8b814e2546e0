"""Finding non-finite parameters, buffers and optimizer slots, and naming them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stepguard.sentinel.gradients import (
    bad_buffers,
    bad_parameters,
    bad_slots,
    extremes,
    largest,
    norm_statistics,
    state_tensors,
)

NAN = math.nan


def test_the_largest_value_carries_nan_and_inf() -> None:
    good = torch.tensor([1.0, 5.0])
    assert largest([]) is None
    assert float(largest([good, torch.zeros(2)])) == 5.0  # type: ignore[arg-type]
    for bad in (NAN, math.inf):
        number = largest([good, torch.tensor([bad, 0.0])])
        assert number is not None
        assert not math.isfinite(number)


def test_tensors_of_several_dtypes_are_compared_together() -> None:
    number = largest([torch.tensor([NAN], dtype=torch.float64), torch.ones(2), torch.tensor([3])])
    assert number is not None
    assert math.isnan(number)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_extremes_are_finite_if_all_elements_are(bad: float) -> None:
    assert extremes(torch.tensor([1, 2])) is None
    both = extremes(torch.tensor([2.0, -1.0]))
    assert both is not None
    assert both.tolist() == [-1.0, 2.0]
    both = extremes(torch.tensor([2.0, bad]))
    assert both is not None
    assert not bool(torch.isfinite(both).all())


def test_bad_tensors_are_named_with_their_kind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loose = nn.Parameter(torch.tensor([NAN]))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    with torch.no_grad():
        model[0].bias[1] = math.inf
    model[1].running_var[0] = NAN
    assert bad_parameters({"": model}, optimizer) == ["param:0.bias", "param:group0[4]"]
    assert bad_parameters({"": model}, optimizer, {id(loose)}) == ["param:0.bias"]
    assert bad_buffers({"critic": model}) == ["buffer:critic.1.running_var"]


def test_bad_slots_are_named_by_parameter_once_each_also_inside_lists() -> None:
    first = nn.Parameter(torch.zeros(1))
    second = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    for parameter in (first, second):
        optimizer.state[parameter] = {"old": [torch.tensor([1.0]), torch.tensor([NAN])], "n": 3}
    named = nn.Module()
    named.first = first
    assert bad_slots({"": named}, optimizer) == ["opt:first/old", "opt:group0[1]/old"]
    assert len(state_tensors(optimizer)) == 4


def test_norm_statistics_are_the_floating_point_buffers_of_norm_layers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    found = norm_statistics({"": model})
    assert [id(t) for t in found] == [id(model[0].running_mean), id(model[0].running_var)]
