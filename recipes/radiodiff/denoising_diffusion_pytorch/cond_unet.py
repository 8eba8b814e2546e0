"""The conditional UNet: two decoders, one for the data term C and one for the noise, from one
encoder.

The time embedding takes the logarithm of the time, as the original does. A time of exactly 0 gives
-inf there, and the sine of it is NaN: this is the recipe's natural failure.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GaussianFourier(nn.Module):
    """Sine and cosine of log(t) / 4 at fixed random frequencies."""

    def __init__(self, features: int, scale: float) -> None:
        super().__init__()
        weights = torch.randn(features // 2, generator=torch.Generator().manual_seed(7)) * scale
        self.register_buffer("weights", weights)

    def forward(self, t: Tensor) -> Tensor:
        angles = 2.0 * math.pi * (torch.log(t) / 4.0)[:, None] * self.get_buffer("weights")
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class ResidualBlock(nn.Module):
    """Two convolutions with GroupNorm; the time scales and shifts the first."""

    def __init__(self, given: int, made: int, time_features: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(given, made, 3, 1, 1), nn.GroupNorm(8, made)
        self.second, self.norm2 = nn.Conv2d(made, made, 3, 1, 1), nn.GroupNorm(8, made)
        self.time = nn.Linear(time_features, 2 * made)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[..., None, None].chunk(2, dim=1)
        hidden = F.silu(self.norm1(self.first(x)) * (scale + 1.0) + shift)
        out: Tensor = F.silu(self.norm2(self.second(hidden))) + self.skip(x)
        return out


class CondUNet(nn.Module):
    """Predicts (C, noise) of a noisy latent at time t, given the condition image."""

    def __init__(
        self, channels: int, dim: int, condition: int = 3, fourier_scale: float = 16.0
    ) -> None:
        super().__init__()
        features = 2 * dim
        self.embed = GaussianFourier(32, fourier_scale)
        self.time = nn.Sequential(nn.Linear(32, features), nn.GELU(), nn.Linear(features, features))
        self.condition = nn.Sequential(
            nn.Conv2d(condition, dim, 3, 2, 1), nn.SiLU(), nn.Conv2d(dim, dim, 3, 2, 1)
        )
        self.enter = nn.Conv2d(channels + dim, dim, 3, 1, 1)
        self.down, self.shrink = ResidualBlock(dim, dim, features), nn.Conv2d(dim, 2 * dim, 3, 2, 1)
        self.middle = ResidualBlock(2 * dim, 2 * dim, features)
        self.up_data, self.up_noise = (
            ResidualBlock(3 * dim, dim, features),
            ResidualBlock(3 * dim, dim, features),
        )
        self.out_data, self.out_noise = nn.Conv2d(dim, channels, 1), nn.Conv2d(dim, channels, 1)

    def forward(self, x: Tensor, t: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        time = self.time(self.embed(t))
        hidden = self.down(self.enter(torch.cat([x, self.condition(condition)], dim=1)), time)
        middle = self.middle(self.shrink(hidden), time)
        joined = torch.cat([F.interpolate(middle, scale_factor=2.0), hidden], dim=1)
        data, noise = (
            self.out_data(self.up_data(joined, time)),
            self.out_noise(self.up_noise(joined, time)),
        )
        k = t[:, None, None, None]
        damped = torch.sqrt(k.square() + 1.0)
        return (1.0 - k) * x + k / damped * data, k.sqrt() * x + torch.sqrt(
            1.0 - k
        ) / damped * noise
