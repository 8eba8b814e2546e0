"""Noise schedules, times and loss weights of diffusion models, always computed in float32 or wider.

In bfloat16 a uniform time equals exactly 1 once in 512 draws, where most schedules divide by zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepguard._errors import ConfigError
from stepguard.numerics.losses import Events, events
from stepguard.numerics.safe import safe_log


def sample_times(
    number: int,
    *,
    eps: float = 1e-4,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw uniform times in [eps, 1] in float32, never 0."""
    _inside("sample_times", "eps", eps)
    uniform = torch.rand(number, device=device, generator=generator, dtype=torch.float32)
    return uniform * (1.0 - eps) + eps


def masking_schedule(t: Tensor, *, eps: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Return sigma(t) = -log(1 - (1 - eps) t) of a masked diffusion, and its derivative.

    Both are finite for every t in [0, 1].
    """
    _inside("masking_schedule", "eps", eps)
    left = 1.0 - (1.0 - eps) * t.double()
    sigma = -torch.log(left)
    derivative = (1.0 - eps) / left
    return sigma.float(), derivative.float()


def min_snr_weight(alphas: Tensor, *, predicts: str = "noise", gamma: float = 5.0) -> Tensor:
    """Return min(SNR, gamma) as a weight of the squared error of noise, data or velocity.

    Bounded by gamma (noise: by 1), also at both ends of the schedule. `alphas` are cumulative
    products.
    """
    if not gamma > 0:
        raise ConfigError(f"min_snr_weight: gamma={gamma!r} must be above 0, for instance 5.0.")
    kept = alphas.double().clamp(0.0, 1.0)
    noise = 1.0 - kept
    # min(snr, gamma) and its quotients, written without dividing by a noise or a signal of 0.
    if predicts == "noise":
        ratio = gamma * noise / torch.where(kept > 0, kept, 1.0)
        return torch.where(kept > 0, ratio.clamp(max=1.0), 1.0).float()
    snr = kept / torch.where(noise > 0, noise, 1.0)
    bounded = torch.where(kept < gamma * noise, snr, gamma)
    if predicts == "data":
        return bounded.float()
    if predicts == "velocity":
        return (bounded * noise).float()
    raise ConfigError(
        f"min_snr_weight: predicts={predicts!r} is not known; use 'noise', 'data' or 'velocity'."
    )


def ddm_weights(
    t: Tensor, *, kind: str = "exponential", limit: float = 100.0, count: Events = events
) -> tuple[Tensor, Tensor]:
    """Return data and noise weight of a decoupled diffusion loss, at most `limit`, in float32.

    `exponential`: 2 exp(1 - t) and exp(sqrt t), which are bounded by themselves. `root`: (t + 1) /
    sqrt t and sqrt(2 - t) / sqrt(1 - t), singular at 0 and 1: there the limit acts, and is counted
    as `ddm_weights.limited`.
    """
    wide = t.double().clamp(0.0, 1.0)
    if kind == "exponential":
        data = 2.0 * torch.exp(1.0 - wide)
        noise = torch.exp(wide.sqrt())
    elif kind == "root":
        tiny = torch.finfo(torch.float64).tiny
        data = (wide + 1.0) / wide.clamp(min=tiny).sqrt()
        noise = ((2.0 - wide) / (1.0 - wide).clamp(min=tiny)).sqrt()
    else:
        raise ConfigError(f"ddm_weights: kind={kind!r} is not known; use 'exponential' or 'root'.")
    count.add("ddm_weights.limited", (data > limit) | (noise > limit))
    return data.clamp(max=limit).float(), noise.clamp(max=limit).float()


def time_features(t: Tensor, frequencies: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Return sine and cosine of log(t) at the frequencies; t is not below `eps`, log(0) is -inf."""
    _inside("time_features", "eps", eps)
    log_time = safe_log(t.float(), floor=eps).unsqueeze(-1)
    angles = log_time / 4.0 * frequencies.float() * (2.0 * math.pi)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _inside(function: str, name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ConfigError(
            f"{function}: {name}={value!r} must lie between 0 and 1, for instance 1e-4."
        )
