"""Roots, powers, norms, angles, logarithm, softmax and division that are finite where they break.

Each selects its argument before the function is applied (and the result after it), because a
`where` behind the function alone still multiplies an infinite derivative by zero. Outside the
domain the answer is NaN, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepguard._errors import ConfigError
from stepguard.tensors.values import at_least_float32


def lasting_eps(eps: float, dtype: torch.dtype) -> float:
    """Return `eps`, or the smallest normal number of `dtype` if `eps` is too small for it."""
    if not 0.0 < eps < 1.0:
        raise ConfigError(f"eps={eps!r} must lie between 0 and 1, for instance 1e-6.")
    return max(eps, float(torch.finfo(dtype).tiny))


def safe_sqrt(x: Tensor) -> Tensor:
    """Return sqrt(x); at 0 the gradient is 0 instead of infinite. Negative numbers give NaN."""
    zero = x == 0
    root = torch.sqrt(torch.where(zero, torch.ones_like(x), x))
    return torch.where(zero, torch.zeros_like(x), root)


def safe_norm(
    x: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False
) -> Tensor:
    """Return the 2-norm without overflow or underflow; the gradient of a zero vector is 0."""
    wide = at_least_float32(x)
    axes = tuple(range(x.dim())) if dim is None else dim
    largest = wide.detach().abs().amax(dim=axes, keepdim=True)
    # A non-finite vector keeps its Inf or NaN; a zero one is divided by 1.
    scale = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    squares = (wide / scale).square().sum(dim=axes, keepdim=True)
    norm = safe_sqrt(squares) * scale
    if not keepdim:
        norm = norm.squeeze(axes)
    return norm.to(x.dtype)


def safe_acos(x: Tensor, margin: float | None = None) -> Tensor:
    """Return acos(x) with a bounded slope: within `margin` of -1 and 1 its tangent.

    Rounding may carry a cosine past 1 by less than the margin; farther out the answer is NaN. The
    default margin of four rounding errors bounds the slope by about 1000 in float32.
    """
    return _with_tangents(torch.acos, -1.0, x, margin)


def safe_asin(x: Tensor, margin: float | None = None) -> Tensor:
    """Return asin(x) with a bounded slope near -1 and 1; see `safe_acos`."""
    return _with_tangents(torch.asin, 1.0, x, margin)


def _with_tangents(
    function: Callable[[Tensor], Tensor], sign: float, x: Tensor, margin: float | None
) -> Tensor:
    """The function of x in float32 at least, within `margin` of -1 and 1 its tangent."""
    wide = at_least_float32(x)
    if margin is None:
        margin = 4.0 * torch.finfo(x.dtype).eps
    if not 0.0 < margin < 1.0:
        name = f"safe_{function.__name__}"
        raise ConfigError(f"{name}: margin={margin!r} must lie between 0 and 1, for instance 1e-6.")
    edge = 1.0 - margin
    inside = wide.clamp(-edge, edge)
    slope = sign * torch.rsqrt(1.0 - inside.detach().square())
    angle = function(inside) + (wide - inside) * slope
    outside = torch.full_like(angle, torch.nan)
    return torch.where(wide.abs() <= 1.0 + margin, angle, outside).to(x.dtype)


def safe_log(x: Tensor, floor: float | None = None) -> Tensor:
    """Return log(x), not below log(floor), with gradient 0 there. Negative numbers give NaN."""
    smallest = float(torch.finfo(x.dtype).tiny)
    floor = smallest if floor is None else lasting_eps(floor, x.dtype)
    low = (x >= 0) & (x < floor)
    return torch.log(torch.where(low, torch.full_like(x, floor), x))


def safe_div(
    numerator: Tensor | float, denominator: Tensor | float, *, otherwise: float = 0.0
) -> Tensor:
    """Return the quotient; `otherwise`, without a gradient, where the denominator is exactly 0.

    Either may be a Python number.
    """
    if not isinstance(denominator, Tensor):
        if not isinstance(numerator, Tensor):
            numerator = torch.tensor(float(numerator))
        if denominator:
            return numerator / denominator
        # 0 times it, not a new tensor: the result stays part of the graph.
        return numerator.nan_to_num(0.0, 0.0, 0.0) * 0.0 + otherwise
    zero = denominator == 0
    quotient = numerator / torch.where(zero, torch.ones_like(denominator), denominator)
    return torch.where(zero, torch.full_like(quotient, otherwise), quotient)


def safe_pow(x: Tensor, exponent: Tensor | float) -> Tensor:
    """Return x ** exponent; where x is 0 its gradient is 0. Negative numbers give NaN as in torch.

    0 to a negative power is still infinite.
    """
    zero = x == 0
    power = torch.where(zero, torch.ones_like(x), x) ** exponent
    return torch.where(zero, torch.zeros_like(x).detach() ** exponent, power)


def safe_atan2(y: Tensor, x: Tensor) -> Tensor:
    """Return atan2(y, x); where both are 0 the angle is 0 and so is the gradient."""
    zero = (y == 0) & (x == 0)
    angle = torch.atan2(
        torch.where(zero, torch.zeros_like(y), y), torch.where(zero, torch.ones_like(x), x)
    )
    return torch.where(zero, torch.zeros_like(angle), angle)


def safe_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the softmax; a row that is -inf throughout gets weight 0 and gradient 0."""
    dead = (x == -torch.inf).all(dim=dim, keepdim=True)
    weights = torch.softmax(x.masked_fill(dead, 0.0), dim=dim)
    return weights.masked_fill(dead, 0.0)
