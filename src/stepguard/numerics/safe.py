"""Square root, norm, acos, logarithm and division with a finite gradient at the singular point.

Each selects its argument before the function is applied (and the result after it), because a
`where` behind the function alone still multiplies an infinite derivative by zero. Outside the
domain the answer is NaN, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepguard._errors import ConfigError


def lasting_eps(eps: float, dtype: torch.dtype) -> float:
    """`eps`, or the smallest normal number of `dtype` where `eps` would become 0 or lose its digits
    in it.
    """
    if not 0.0 < eps < 1.0:
        raise ConfigError(f"eps={eps!r} must lie between 0 and 1, for instance 1e-6.")
    return max(eps, float(torch.finfo(dtype).tiny))


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x); at 0 the gradient is 0 instead of infinite. Negative numbers give NaN."""
    zero = x == 0
    return torch.where(
        zero, torch.zeros_like(x), torch.sqrt(torch.where(zero, torch.ones_like(x), x))
    )


def safe_norm(
    x: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False
) -> Tensor:
    """2-norm that neither overflows nor underflows on the way; the gradient of a zero vector is 0."""
    wide = _wide(x)
    axes = tuple(range(x.dim())) if dim is None else dim
    largest = wide.detach().abs().amax(dim=axes, keepdim=True)
    # a non-finite vector keeps its Inf or NaN; a zero one is divided by 1
    scale = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    squares = (wide / scale).square().sum(dim=axes, keepdim=True)
    norm = safe_sqrt(squares) * scale
    return (norm if keepdim else norm.squeeze(axes)).to(x.dtype)


def safe_acos(x: Tensor, margin: float | None = None) -> Tensor:
    """acos(x) with a bounded slope: within `margin` of -1 and 1 it goes on as its tangent.

    Rounding may carry a cosine past 1 by less than the margin; farther out the answer is NaN. The
    default margin of four rounding errors bounds the slope by about 1000 in float32.
    """
    wide = _wide(x)
    margin = 4.0 * torch.finfo(x.dtype).eps if margin is None else margin
    if not 0.0 < margin < 1.0:
        raise ConfigError(
            f"safe_acos: margin={margin!r} must lie between 0 and 1, for instance 1e-6."
        )
    edge = 1.0 - margin
    inside = wide.clamp(-edge, edge)
    slope = torch.rsqrt(1.0 - inside.detach().square())
    angle = torch.acos(inside) - (wide - inside) * slope
    return torch.where(wide.abs() <= 1.0 + margin, angle, torch.full_like(angle, torch.nan)).to(
        x.dtype
    )


def safe_log(x: Tensor, floor: float | None = None) -> Tensor:
    """log(x), not below log(floor), with gradient 0 below the floor. Negative numbers give NaN."""
    floor = float(torch.finfo(x.dtype).tiny) if floor is None else lasting_eps(floor, x.dtype)
    low = (x >= 0) & (x < floor)
    return torch.log(torch.where(low, torch.full_like(x, floor), x))


def safe_div(numerator: Tensor, denominator: Tensor, *, otherwise: float = 0.0) -> Tensor:
    """numerator / denominator; where the denominator is exactly 0 the value is `otherwise`, without
    a gradient.
    """
    zero = denominator == 0
    quotient = numerator / torch.where(zero, torch.ones_like(denominator), denominator)
    return torch.where(zero, torch.full_like(quotient, otherwise), quotient)


def _wide(x: Tensor) -> Tensor:
    """At least float32: half precision squares out of its range at 256."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
