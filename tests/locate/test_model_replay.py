"""The model's part of a watched step: what is made inside it, and what came from outside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.replay import (
    CAME_IN,
    OUTSIDE_BACKWARD,
    OUTSIDE_BOTH,
    OUTSIDE_FORWARD,
    ModelReplayer,
)
from stepguard.records import Origin, Reading
from stepguard.state.batch import OUTPUT_GRADIENT, Step
from stepguard.state.isolation import untouched

from .cases import noise
from .test_bad_micro_batch import step_of

BAD_LOSS = Reading(step=0, loss=math.nan, grads_finite=False)
BAD_GRADIENT = Reading(step=0, loss=1.0, grads_finite=False, bad_grads=("weight",))


def watched(model: nn.Module, x: Tensor, gradient: Tensor | None) -> Step:
    """A step of which only the call `model(x)` is known, and the gradient of its output."""
    step = step_of(lambda batch: batch, model, x)
    step.loss_fn = None
    step.micro_batches = ({"x": x, OUTPUT_GRADIENT: {} if gradient is None else {"0": gradient}},)
    step.lines = ((__file__, 7),)

    def model_fn(batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        return [model(batch["x"])], [batch[OUTPUT_GRADIENT].get("0")]

    step.model_fn = model_fn
    return step


def outside(step: Step, reading: Reading) -> Origin:
    with untouched(step) as keeper:
        return ModelReplayer(step, keeper).outside_model(reading)


def test_bad_output_goes_before_bad_gradients() -> None:
    step = watched(nn.Linear(3, 1), torch.full((2, 3), math.nan), torch.ones(2, 1))
    with untouched(step) as keeper:
        replayer = ModelReplayer(step, keeper)
        assert replayer.bad_call() == 0
        assert not replayer.run(0).loss_finite


def test_bad_gradient_of_the_model_itself() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sqrt()

    model = Root(3, 1, bias=False)
    step = watched(model, torch.zeros(2, 3), torch.ones(2, 1))
    with untouched(step) as keeper:
        replayer = ModelReplayer(step, keeper)
        assert replayer.bad_call() == 0
        ran = replayer.run(0)
        assert ran.loss_finite and ran.bad_gradients


def test_remarks_say_where_the_value_was_not_made() -> None:
    model = nn.Linear(3, 1)
    clean = watched(model, noise(2, 3), torch.ones(2, 1))
    assert outside(clean, BAD_LOSS).remarks == (OUTSIDE_FORWARD,)
    assert outside(clean, BAD_GRADIENT).remarks == (OUTSIDE_BOTH,)
    bad = watched(model, noise(2, 3), torch.full((2, 1), math.inf))
    assert outside(bad, BAD_GRADIENT).remarks == (OUTSIDE_BACKWARD,)


def test_caller_of_the_model_is_the_source_where_the_trace_has_none() -> None:
    step = watched(nn.Linear(3, 1), noise(2, 3), None)
    with untouched(step) as keeper:
        replayer = ModelReplayer(step, keeper)
        origin = replayer.with_caller(Origin(step=0, phase="input", tensor="batch:x"), 0)
        assert origin.source is not None and origin.source.endswith("test_model_replay.py:7")
        known = Origin(step=0, phase="forward", source="model.py:3")
        assert replayer.with_caller(known, 0) is known
        assert replayer.with_caller(Origin(step=0, phase="state"), 0).source is None


def test_computed_argument_is_not_called_data() -> None:
    leaf = noise(2, 3).requires_grad_()
    step = watched(nn.Linear(3, 1), leaf * 2.0, None)
    with untouched(step) as keeper:
        replayer = ModelReplayer(step, keeper)
        origin = replayer.with_caller(Origin(step=0, phase="input", tensor="batch:x"), 0)
    assert (origin.phase, origin.tensor) == ("forward", None)
    assert CAME_IN in origin.remarks
