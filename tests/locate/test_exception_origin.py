"""Exceptions of the user's code: read from the traceback, then proven by replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate.origins import (
    place_exception,
    place_replayed_exception,
    traceback_origin,
)
from stepguard.locate.replay import LocateBudget
from stepguard.records import Origin
from stepguard.state.batch import Step

from .cases import noise
from .test_bad_micro_batch import step_of


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative input")
        return self.fc(x)


def strict_step(*micro_batches: Tensor) -> Step:
    model = nn.Sequential(Strict())
    return step_of(lambda x: model(x).pow(2).mean(), model, *micro_batches)


def raised(step: Step, micro: int = 0) -> tuple[Exception, Origin]:
    assert step.loss_fn is not None
    with pytest.raises(Exception) as caught:
        step.loss_fn(step.micro_batches[micro])
    error = caught.value
    assert isinstance(error, Exception)
    return error, traceback_origin(error, 0, step.named_roots())


def test_traceback_names_line_module_and_phase() -> None:
    _, origin = raised(strict_step(torch.tensor([[-1.0, 1.0, 1.0]])))
    assert (origin.phase, origin.module, origin.method) == ("forward", "0", "traceback")
    assert origin.source is not None and origin.source.startswith("tests/locate/test_exception")
    assert any("negative input" in line for line in origin.context)


def test_error_of_the_loss_expression_is_outside_the_model() -> None:
    model = nn.Linear(3, 1)
    step = step_of(lambda x: model(x).reshape(7).sum(), model, noise(4, 3))
    error, origin = raised(step)
    assert (origin.phase, origin.module) == ("loss", None)
    placed = place_exception(origin, error, step, 0, LocateBudget(10.0))
    assert placed.reproduced is True and placed.samples == ()


def test_guilty_sample_is_proven_by_leaving_it_out() -> None:
    x = noise(8, 3).abs()
    x[5, 0] = -1.0
    step = strict_step(x)
    error, origin = raised(step)
    placed = place_exception(origin, error, step, 0, LocateBudget(10.0))
    assert (placed.reproduced, placed.samples, placed.micro_batch) == (True, (5,), 0)


def test_exception_that_does_not_come_again_is_not_reproduced() -> None:
    step = strict_step(-noise(2, 3).abs())
    error, origin = raised(step)
    model = step.model
    step.loss_fn = lambda x: model(x.abs()).mean()
    placed = place_exception(origin, error, step, 0, LocateBudget(10.0))
    assert placed.reproduced is False and placed.samples == ()


def test_recorded_step_is_run_and_its_exception_placed() -> None:
    x = noise(4, 3).abs()
    x[2] = -1.0
    origin = place_replayed_exception(strict_step(noise(4, 3).abs(), x))
    assert (origin.micro_batch, origin.samples, origin.reproduced) == (1, (2,), True)


def test_recorded_step_that_runs_now_is_not_reproduced() -> None:
    origin = place_replayed_exception(strict_step(noise(4, 3).abs()))
    assert origin.reproduced is False


def test_operation_that_failed_is_named() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(x: Any) -> Tensor:
        return torch.linalg.cholesky(model(x).reshape(2, 2) * 0.0 - 1.0).sum()

    step = step_of(loss_fn, model, noise(4, 3))
    error, origin = raised(step)
    placed = place_exception(origin, error, step, 0, LocateBudget(10.0))
    assert placed.op == "aten.linalg_cholesky_ex"
