"""The two noises: tokens that are masked (MDLM), and a latent that is mixed with a normal one
(DDPM).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masking(t: Tensor, *, eps: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Weight of the loss and probability of a mask at the times `t`.

    `dtype` is the original's way: the times are cast first. In bfloat16 every time above 0.998 is
    then exactly 1, where the rate divides by zero and sigma is the logarithm of zero: once in 512
    samples. None computes in float32.
    """
    if dtype is None:
        left = 1.0 - (1.0 - eps) * t.double()
        sigma, rate = -torch.log(left).float(), ((1.0 - eps) / left).float()
    else:
        rate, sigma = _as_the_original(t.to(dtype), eps)
    return rate / torch.expm1(sigma), 1.0 - torch.exp(-sigma)


def _as_the_original(t: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inside = t.clip(eps, 1.0)
    return (1.0 - eps) / (1.0 - (1.0 - eps) * inside), -torch.log1p(-(1.0 - eps) * inside)


class LatentNoise:
    """A table of how much of the latent is left; continuous times in [0, 1] are looked up in it."""

    def __init__(
        self, steps: int, schedule: str, beta_min: float, beta_max: float, predicts: str
    ) -> None:
        self.steps, self.predicts = steps, predicts
        self.alphas = _alphas(steps, schedule, beta_min, beta_max)

    def add(self, latent: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The noised latent, and what the network shall say about it."""
        index = (t.float() * self.steps).long().clamp(0, self.steps - 1)
        left = self.alphas.to(t.device)[index][:, None]
        kept, added = left.sqrt(), (1.0 - left).sqrt()
        target = {"epsilon": noise, "x0": latent, "v": kept * noise - added * latent}[self.predicts]
        return kept * latent + added * noise, target


def _alphas(steps: int, schedule: str, beta_min: float, beta_max: float) -> Tensor:
    if schedule == "cosine":
        # in float64, with bounded betas: positive and falling to the end
        times = torch.linspace(0.0, 1.0, steps + 1, dtype=torch.float64)
        level = torch.cos((times + 0.008) / 1.008 * math.pi / 2).square()
        betas = (1.0 - level[1:] / level[:-1]).clamp(1e-4, 0.9999)
        return torch.cumprod(1.0 - betas, dim=0).float()
    grid = torch.linspace(0.0, 1.0, steps, dtype=torch.float64)
    if schedule == "sigmoid":
        grid = torch.sigmoid(12.0 * grid - 6.0)
    scale = 1000.0 / steps  # the bounds are those of a thousand steps
    betas = (scale * (beta_min + (beta_max - beta_min) * grid)).clamp(max=0.9999)
    return torch.cumprod(1.0 - betas, dim=0).float()
