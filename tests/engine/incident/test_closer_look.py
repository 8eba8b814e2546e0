"""The closer look names what is bad, and tells an overflow of the loss scale from a real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from engine.parts import step_of
from scenes import batches, calm_net, poisoned, quiet
from stepguard import Guard
from stepguard.engine.incident.closer_look import (
    accept,
    agreed_trouble,
    bad_tensors,
    born_in_update,
    examine,
    overflows_by_scale,
    stored_trouble,
    working_scale,
)
from stepguard.records import Reading
from stepguard.state.isolation import rerun

DATA = batches(2)
BAD = Reading(step=0, loss=math.nan, micro_losses=(math.nan,), grads_finite=False)


@pytest.fixture
def guard() -> Iterator[Guard]:
    model = calm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Guard(model, optimizer, config=quiet()) as made:
        yield made


def _model(guard: Guard) -> nn.Module:
    return guard._context.model


def test_bad_batch_and_gradients_are_named(guard: Guard) -> None:
    model = _model(guard)
    step = step_of(poisoned(DATA[0]), model=model)
    nn.functional.cross_entropy(model(step.micro_batches[0][0]), DATA[0][1]).backward()
    seen = examine(guard._context, step, BAD)
    assert seen.bad_inputs and seen.bad_inputs[0].startswith("batch:")
    assert set(seen.bad_grads) == {"0.weight", "3.weight"}
    assert seen.bad_state == ()


def test_gradients_that_are_gone_are_made_again(guard: Guard) -> None:
    step = step_of(poisoned(DATA[0]), model=_model(guard), grads_gone=True)
    assert set(examine(guard._context, step, BAD).bad_grads) == {"0.weight", "3.weight"}


def test_stored_tensor_that_is_bad_is_named_until_it_is_accepted(guard: Guard) -> None:
    with torch.no_grad():
        _model(guard)[0].weight[0, 0] = math.inf  # type: ignore[index, union-attr]
    assert stored_trouble(guard._context) == ["param:0.weight"]
    assert agreed_trouble(guard._context, together=True) == ("param:0.weight",)
    assert bad_tensors(_model(guard)) == ("param:0.weight",)
    accept(guard._context, ["param:0.weight"])
    assert stored_trouble(guard._context) == []
    assert born_in_update(guard._context) == []


def test_what_an_update_made_bad_is_named(guard: Guard) -> None:
    assert born_in_update(guard._context) == []
    with torch.no_grad():
        _model(guard)[3].weight.fill_(math.nan)  # type: ignore[index, union-attr]
    assert born_in_update(guard._context) == ["param:3.weight"]


def test_running_statistic_of_a_norm_layer_must_be_finite() -> None:
    model = calm_net()
    model[1].running_mean[0] = math.nan  # type: ignore[index]
    model.register_buffer("sentinel", torch.tensor(math.inf))
    assert bad_tensors(model) == ("buffer:1.running_mean",)


def _overflowing(scale: float) -> Any:
    """A step whose gradients are finite unless the loss is scaled by more than 1e30."""
    model = nn.Linear(6, 3)

    def loss(batch: Any) -> torch.Tensor:
        return model(batch[0]).sum() * 1e8

    return step_of(DATA[0], model=model, loss_fn=loss, scale=scale)


def test_static_scale_is_the_only_fault_where_the_step_is_finite_without_it(guard: Guard) -> None:
    assert overflows_by_scale(guard._context, _overflowing(1e38), BAD)
    assert not overflows_by_scale(guard._context, step_of(poisoned(DATA[0]), scale=8.0), BAD)
    assert not overflows_by_scale(guard._context, step_of(DATA[0], scale=1.0), BAD)


def test_working_scale_is_half_of_the_largest_that_works() -> None:
    step = _overflowing(2.0**120)
    scale = working_scale(step)
    assert rerun(step, scale=2 * scale).grads_finite
    assert not rerun(step, scale=4 * scale).grads_finite
