"""A small run whose fourth batch is NaN, for the tests of each sink."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import stepguard
from stepguard import GuardConfig

STEPS = 6
BAD = 3


def train(*sinks: Any) -> list[float]:
    """A small run whose fourth batch is NaN; returns the losses."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(terminal="quiet", sinks=sinks)
    losses = []

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(STEPS):
            batch = torch.full((2, 3), math.nan if step == BAD else 1.0)
            losses.append(float(guard.step(loss_fn, batch).loss or 0.0))
    return losses


def without_bad(values: list[float]) -> list[float]:
    return [value for step, value in enumerate(values) if step != BAD]
