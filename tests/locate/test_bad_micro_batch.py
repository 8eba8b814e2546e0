"""The bad micro-batch, faults of compiled code only, and steps that repeat their bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate.replay import Replayer
from stepguard.locate.samples import bad_micro_batch, compiled_only, steadiness
from stepguard.records import Reading
from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.rng import capture_rng

from .cases import noise


def step_of(loss_fn: Callable[[Any], Tensor], model: nn.Module, *micro_batches: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = BufferKeeper([model])
    keeper.remember()
    rng = [capture_rng() for _ in micro_batches]
    return Step(0, model, optimizer, {}, keeper, loss_fn, micro_batches, rng)


def scaled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Finite losses; the gradient of the square root at 0 is not."""
    return lambda x: (model(x) * 0.0).abs().sum().sqrt() + model(x).pow(2).mean()


def test_bad_gradient_is_searched_and_earlier_gradients_stay() -> None:
    model = nn.Linear(3, 1, bias=False)

    def loss_fn(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        if bool((x == 0).all()):
            loss = loss + model(x).sum().sqrt()
        return loss

    step = step_of(loss_fn, model, noise(4, 3), torch.zeros(4, 3), noise(4, 3))
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        assert bad_micro_batch(replayer, Reading(step=0, loss=1.0, grads_finite=False)) == 1
        kept = model.weight.grad
        assert kept is not None
        replayer.clear_gradients()
        replayer.run(0)
        assert torch.equal(kept, model.weight.grad)


def test_bad_loss_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    step = step_of(scaled(model), model, noise(4, 3), noise(4, 3))
    reading = Reading(step=0, loss=math.nan, micro_losses=(1.0, math.nan), grads_finite=False)
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        monkeypatch.setattr(replayer, "run", None)
        assert bad_micro_batch(replayer, reading) == 1


def test_step_without_compiled_code_is_not_run_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    step = step_of(scaled(model), model, noise(4, 3))
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        monkeypatch.setattr(replayer, "run", None)
        assert compiled_only(replayer) is None


def test_repeated_bits_and_unsteady_ones() -> None:
    model = nn.Linear(3, 1)
    step = step_of(lambda x: model(x).pow(2).mean(), model, noise(4, 3))
    with untouched(step) as keeper:
        assert steadiness(Replayer(step, keeper)).same_bits
        factors = iter([1.0, 2.0, 3.0])
        step.loss_fn = lambda x: model(x).pow(2).mean() * next(factors)
        assert not steadiness(Replayer(step, keeper)).same_bits
