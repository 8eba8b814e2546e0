"""A replay leaves no trace on parameters, modes, random numbers and warnings."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched


def step_of(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(0, model, optimizer, {}, BufferKeeper([model]))


def test_gradients_modes_buffers_and_random_numbers_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    gradient = torch.ones(2, 2)
    model[0].weight.grad = gradient
    mean = model[1].running_mean.clone()
    rng = torch.get_rng_state()
    with untouched(step_of(model)):
        assert model[0].weight.grad is None
        model(torch.randn(4, 2)).sum().backward()
        model.eval()
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 2))
    assert model.training
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), rng)


def test_hooks_on_finished_gradients_do_not_run_inside_and_are_back_after() -> None:
    model = nn.Linear(1, 1)
    calls: list[int] = []
    hook = model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    with untouched(step_of(model)):
        model(torch.ones(1)).sum().backward()
    assert calls == []
    model(torch.ones(1)).sum().backward()
    assert calls == [1]
    hook.remove()


def test_warnings_inside_are_silent_and_filters_are_put_back() -> None:
    before = list(warnings.filters)
    with untouched(step_of(nn.Linear(1, 1))):
        warnings.warn("again", stacklevel=1)
    assert list(warnings.filters) == before
