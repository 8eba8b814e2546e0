"""Tell whether an update could make NaN out of finite gradients; then it is checked at once.

Checking costs a copy of parameters and optimizer state, so it is done only where the arithmetic
says it can happen: fp16 parameters, an epsilon that is 0 in the parameter's dtype, a learning rate
far above everything configured, or an optimizer that is not torch's own, if a gradient is exactly 0
(custom optimizers divide by its norm) or the model is small.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from stepguard.detect.history import LR_JUMP
from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import elements

CHEAP_COPY = 2**16
"""Number of parameters up to which a copy in every step costs next to nothing."""


def is_custom(optimizer: Optimizer) -> bool:
    """True if the optimizer is not torch's own, so that its arithmetic is not known."""
    return not type(optimizer).__module__.startswith("torch.optim.")


def risky_update(
    optimizer: Optimizer, lr_ceiling: tuple[float, ...], least_norm: float | None = None
) -> bool:
    """Could this update turn finite gradients into non-finite weights?"""
    if is_custom(optimizer) and (least_norm == 0.0 or _is_small(optimizer)):
        return True
    for index, group in enumerate(optimizer.param_groups):
        ceiling = lr_ceiling[index] if index < len(lr_ceiling) else math.inf
        if _rate_jumps(group, ceiling) or _has_fragile_parameters(group):
            return True
    return False


def _is_small(optimizer: Optimizer) -> bool:
    count: int = sum(map(elements, optimizer_parameters(optimizer)))
    return count <= CHEAP_COPY


def _rate_jumps(group: dict[str, Any], ceiling: float) -> bool:
    rate = group.get("lr")
    # Written with `not <=` so that a rate of NaN jumps, too.
    return rate is not None and not float(rate) <= LR_JUMP * max(ceiling, 1e-30)


def _has_fragile_parameters(group: dict[str, Any]) -> bool:
    eps = _epsilon(group)
    dtypes = {parameter.dtype for parameter in group["params"]}
    return any(_is_fragile(dtype, eps) for dtype in dtypes)


def _epsilon(group: dict[str, Any]) -> float | None:
    eps = group.get("eps")
    # Adafactor has two; None stands for the dtype's own.
    if isinstance(eps, tuple | list):
        eps = next((e for e in eps if isinstance(e, float)), None)
    if not isinstance(eps, int | float):
        return None
    return float(eps)


@cache
def _is_fragile(dtype: torch.dtype, eps: float | None) -> bool:
    """fp16 overflows at 65504; an epsilon that rounds to 0 lets an update divide by 0."""
    if dtype is torch.float16:
        return True
    if eps is None or not dtype.is_floating_point:
        return False
    return float(torch.tensor(eps, dtype=dtype)) == 0.0
