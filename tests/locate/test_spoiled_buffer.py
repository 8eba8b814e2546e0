"""A buffer that the forward made bad: the operation that wrote it, or the layer that keeps it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from stepguard.locate.origins import buffer_origin
from stepguard.records import Reading

from .cases import noise
from .test_bad_micro_batch import step_of


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.level.add_(x.min().log())
        return self.fc(x)


def reading(name: str) -> Reading:
    return Reading(step=0, loss=1.0, grads_finite=True, bad_state=(name,), state_born=True)


def test_operation_that_wrote_the_buffer_is_named() -> None:
    model = Averaging()
    x = noise(4, 3).abs()
    x[1, 2] = 0.0
    step = step_of(lambda batch: model(batch).pow(2).mean(), model, x)
    origin = buffer_origin(step, reading("buffer:level"))
    assert (origin.op, origin.tensor, origin.reproduced) == ("aten.log", "buffer:level", True)
    assert origin.output is not None and origin.output.neginf == 1
    assert float(model.level) == 0.0


def test_statistics_of_a_norm_layer_are_placed_at_the_layer() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = noise(4, 3)
    x[0, 0] = math.inf
    step = step_of(lambda batch: model(batch).nan_to_num(0.0).mean(), model, x)
    origin = buffer_origin(step, reading("buffer:0.running_mean"))
    assert origin.module == "0" and origin.op is not None and "batch_norm" in origin.op


def test_buffer_that_stays_fine_is_not_reproduced() -> None:
    model = Averaging()
    step = step_of(lambda batch: model(batch).pow(2).mean(), model, noise(4, 3).abs() + 1.0)
    origin = buffer_origin(step, reading("buffer:level"))
    assert origin.reproduced is False and origin.op is None
