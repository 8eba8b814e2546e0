"""Steps under a whole guard, for tests that ask for place and cause together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepguard import Guard, GuardConfig, Incident, Policy, TrainingHalted

SKIPPING = GuardConfig(terminal="quiet", policy=Policy(actions=("skip", "stop")))
"""A bad step is left out whole: the loss function is called again by replays only."""
LossFn = Callable[[Any], Any]


def noise(seed: int, count: int = 4, width: int = 3) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def first_incident(
    model: nn.Module, loss_fn: LossFn, batch: Callable[[int], Any], steps: int = 2
) -> Incident:
    """The first incident of a short run; fails where there is none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Guard(model, optimizer, config=SKIPPING) as guard:
        for step in range(steps):
            try:
                guard.step(loss_fn, batch(step))
            except TrainingHalted:
                break
            if guard.incidents:
                break
        assert guard.incidents, "the run stayed healthy"
        return guard.incidents[0]


def code(incident: Incident) -> str:
    """The code of the first finding, or what there is instead."""
    return incident.findings[0].code if incident.findings else "no cause"


def evidence(incident: Incident) -> str:
    return " | ".join(incident.findings[0].evidence)
