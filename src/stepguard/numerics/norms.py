"""RMSNorm in float32, with an eps that is felt in the backward as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepguard._errors import ConfigError
from stepguard.tensors.values import at_least_float32

SMALLEST_EPS = 1e-12
"""At zero input the gradient is multiplied by 1 / sqrt(eps): by a million with this one."""


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) over the last dimension, computed in float32."""
    wide = at_least_float32(x)
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        scaled = scaled * weight.to(scaled.dtype)
    return scaled.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight."""

    def __init__(self, features: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not SMALLEST_EPS <= eps < 1.0:
            raise ConfigError(
                f"RMSNorm: eps={eps!r} must lie between {SMALLEST_EPS:g} and 1; "
                "a smaller one multiplies gradients by more than a million where the input is 0."
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps:g}"
