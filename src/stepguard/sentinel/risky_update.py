"""When an optimizer could make a NaN out of finite gradients, the update is checked at once and can
be undone.

That costs a copy of parameters and optimizer state, so it is done only where the arithmetic says it
can happen: fp16 parameters, an epsilon that is 0 in the parameter's dtype, a learning rate far
above everything configured, or an optimizer that is not torch's own, if a gradient is exactly 0
(people divide by its norm) or the model is small.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import elements

LR_JUMP = 2.0
CHEAP_COPY = 2**16
"""Parameters of which a copy a step costs next to nothing."""


def foreign(optimizer: Optimizer) -> bool:
    """Is its arithmetic not known from torch?"""
    return not type(optimizer).__module__.startswith("torch.optim.")


def risky_update(
    optimizer: Optimizer, lr_ceiling: tuple[float, ...], least_norm: float | None = None
) -> bool:
    """Could this update turn finite gradients into non-finite weights?"""
    if foreign(optimizer) and (least_norm == 0.0 or _small(optimizer)):
        return True
    for index, group in enumerate(optimizer.param_groups):
        ceiling = lr_ceiling[index] if index < len(lr_ceiling) else math.inf
        rate = group.get("lr")
        if rate is not None and not float(rate) <= LR_JUMP * max(ceiling, 1e-30):
            return True
        eps = _epsilon(group)
        if any(_fragile(dtype, eps) for dtype in {p.dtype for p in group["params"]}):
            return True
    return False


def _small(optimizer: Optimizer) -> bool:
    count: int = sum(map(elements, optimizer_parameters(optimizer)))
    return count <= CHEAP_COPY


def _epsilon(group: dict[str, Any]) -> float | None:
    eps = group.get("eps")
    if isinstance(eps, tuple | list):  # Adafactor has two; None stands for the dtype's own
        eps = next((e for e in eps if isinstance(e, float)), None)
    return float(eps) if isinstance(eps, int | float) else None


@cache
def _fragile(dtype: torch.dtype, eps: float | None) -> bool:
    if dtype is torch.float16:
        return True
    return (
        eps is not None and dtype.is_floating_point and float(torch.tensor(eps, dtype=dtype)) == 0.0
    )
