"""Small worlds that the families share: clouds of points, a regression, a chain to walk along, tiny
networks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES, ROWS = 8, 10, 32


def mlp(inputs: int = FEATURES, hidden: int = 16, outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Clouds:
    """Points around ten centres; the class is the centre."""

    def __init__(self, seed: int, noise: float = 0.6) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(CLASSES, FEATURES, generator=self.generator) * 2
        self.noise = noise

    def batch(self, rows: int = ROWS, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if classes is None:
            classes = torch.randint(CLASSES, (rows,), generator=self.generator)
        noise = torch.randn(len(classes), FEATURES, generator=self.generator)
        return self.centres[classes] + self.noise * noise, classes


def classified(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def squared(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda batch: F.mse_loss(model(batch[0]), batch[1])


def regression(seed: int, noise: float = 0.1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A new batch of a fixed smooth function for every step."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(FEATURES, 1, generator=generator)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, FEATURES, generator=generator)
        return x, torch.tanh(x @ weight) + noise * torch.randn(ROWS, 1, generator=generator)

    return batch


@functools.cache
def converged(seed: int, steps: int = 400) -> dict[str, Tensor]:
    """Weights of a classifier of `Clouds(seed)` that has learnt all it will; trained once for all
    families.
    """
    kept = torch.get_rng_state()
    torch.manual_seed(seed)
    model, clouds = mlp(hidden=32), Clouds(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = classified(model)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss(clouds.batch()))
        optimizer.step()
    torch.set_rng_state(kept)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def pretrained(seed: int) -> tuple[nn.Sequential, Clouds]:
    """A converged model and more of its own data."""
    model = mlp(hidden=32)
    model.load_state_dict(converged(seed))
    clouds = Clouds(seed)
    clouds.generator.manual_seed(seed + 1000)
    return model, clouds


class Chain:
    """Many walkers on a line of ten places: right leads to the treasure at the end, left back to
    the start.
    """

    def __init__(self, seed: int, walkers: int = 16, places: int = 10) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.walkers, self.places = walkers, places
        self.position = torch.zeros(walkers, dtype=torch.long)

    def observe(self) -> Tensor:
        return F.one_hot(self.position, self.places).float()

    def act(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """Reward and whether the walk is over, for every walker; one in ten slips."""
        slips = torch.rand(self.walkers, generator=self.generator) < 0.1
        right = right.bool() ^ slips
        self.position = torch.where(right, self.position + 1, (self.position - 1).clamp(min=0))
        done = self.position >= self.places - 1
        reward = torch.where(done, 10.0, -0.1)
        self.position = torch.where(done, 0, self.position)
        return reward, done


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, rate: float) -> None:
    """The target network moves towards the source."""
    for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
        slow.lerp_(fast, rate)


def copied(model: nn.Module, make: Callable[[], Any]) -> Any:
    """A second network with the same weights, without gradients."""
    other = make()
    other.load_state_dict(model.state_dict())
    return other.requires_grad_(False)
