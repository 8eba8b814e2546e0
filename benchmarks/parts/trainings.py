"""Tiny trainings that the forecast is measured on: what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Training:
    """One run that is about to begin."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any], Tensor]
    batch: Callable[[int], Any]
    """The data of a step."""
    scaler: torch.amp.GradScaler | None = None
    before_step: Callable[[int], None] = lambda step: None
    """What the loop does before a step: a learning rate, a curriculum."""
    broken: Callable[[], str] = lambda: ""
    """In words, if the run has failed with finite numbers."""


@dataclass(frozen=True)
class Kind:
    """A family of trainings."""

    name: str
    begin: Callable[[int], Training]
    """From a seed."""
    steps: int = 300
    about: str = field(default="", compare=False)


def rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = value


def teacher(seed: int, inputs: int, outputs: int) -> nn.Module:
    """A fixed random function to learn."""
    with torch.random.fork_rng():
        torch.manual_seed(10_000 + seed)
        net = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))
    return net.requires_grad_(False)


def examples(seed: int, step: int, *shape: int) -> Tensor:
    """Random inputs, the same for the same seed and step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randn(*shape, generator=generator)


def symbols(seed: int, step: int, count: int, *shape: int) -> Tensor:
    """Random whole numbers, the same for the same seed and step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randint(count, shape, generator=generator)
