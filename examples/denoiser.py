"""A small conditional denoiser with the bug that many diffusion codes have had: noise levels on a
grid that holds 0.

The network is told the logarithm of the noise level. One sample in a thousand has level 0, whose
logarithm is -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 16
LEVELS = 1000
BATCH = 16
HELD_OUT = (0.25, 0.5, 0.75)
"""Noise levels the metric is taken at."""

Batch = dict[str, Tensor]


class LevelEmbedding(nn.Module):
    """The noise level as waves of its logarithm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.5, 8.0, width // 2))
        self.mix = nn.Linear(width, width)

    def forward(self, level: Tensor) -> Tensor:
        scale = torch.log(level)
        angles = scale[:, None] * self.frequencies
        return F.silu(self.mix(torch.cat([angles.sin(), angles.cos()], dim=1)))


class Block(nn.Module):
    """A convolution that the noise level scales and shifts, around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.condition = nn.Linear(width, 2 * width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        scale, shift = self.condition(told)[:, :, None, None].chunk(2, dim=1)
        return x + self.conv(F.silu(self.norm(x) * (1 + scale) + shift))


class Denoiser(nn.Module):
    """From a noisy picture and its noise level to the clean picture."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.level = LevelEmbedding(width)
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        x, told = self.stem(noisy), self.level(level)
        for block in self.blocks:
            x = block(x, told)
        return self.head(x)


def pictures(count: int, draw: torch.Generator) -> Tensor:
    """Bright discs and squares of random place and size with soft edges, on a dark ground."""
    line = torch.linspace(-1, 1, SIZE)
    place = torch.rand(count, 2, generator=draw) - 0.5
    radius = 0.2 + 0.35 * torch.rand(count, generator=draw)
    dx, dy = (line - place[:, :1])[:, None, :], (line - place[:, 1:])[:, :, None]
    disc, square = torch.hypot(dx, dy), torch.maximum(dx.abs(), dy.abs())
    round_one = torch.rand(count, generator=draw) < 0.5
    distance = torch.where(round_one[:, None, None], disc, square)
    return torch.sigmoid(20 * (radius[:, None, None] - distance))[:, None]


def batches(steps: int, seed: int) -> Iterator[Batch]:
    """Pictures with a noise level each, drawn on a grid from 0 to 1."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        level = torch.randint(0, LEVELS, (BATCH,), generator=draw) / LEVELS
        yield {"picture": pictures(BATCH, draw), "level": level, "noise": _noise(BATCH, draw)}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of the denoised pictures."""
    level = batch["level"]
    noisy = batch["picture"] + level[:, None, None, None] * batch["noise"]
    return F.mse_loss(model(noisy, level), batch["picture"])


@torch.no_grad()
def quality(model: nn.Module, seed: int = 99) -> float:
    """Peak signal-to-noise ratio on held-out pictures after denoising, in dB; higher is better."""
    draw = torch.Generator().manual_seed(seed)
    errors = []
    for level in HELD_OUT:
        clean = pictures(128, draw)
        noisy = clean + level * _noise(128, draw)
        errors.append(F.mse_loss(model(noisy, torch.full((128,), level)), clean))
    error = float(torch.stack(errors).mean())
    return -10 * math.log10(error) if error > 0 else math.nan if math.isnan(error) else math.inf


def untouched_quality() -> float:
    """The same for pictures left as noisy as they came."""
    return -10 * math.log10(sum(level**2 for level in HELD_OUT) / len(HELD_OUT))


def _noise(count: int, draw: torch.Generator) -> Tensor:
    return torch.randn(count, 1, SIZE, SIZE, generator=draw)
