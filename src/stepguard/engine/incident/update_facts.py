"""What the optimizer's memory says once something is wrong: how large the last update was, and
whether it can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

FAR_ABOVE = 1e6
"""Times the smallest gradient whose square can be held: what is above it and has no square has lost
it.
"""


def update_ratio(
    optimizer: Optimizer, rates: Sequence[float], last_norm: float | None = None
) -> float | None:
    """Norm of the last update, made with `rates`, over the norm of its weights.

    An optimizer without memory (plain SGD) made it of the last gradient, whose norm is `last_norm`.
    None where too little is remembered. Only asked once something is wrong: it reads every
    parameter.
    """
    pairs = list(_updates(optimizer, rates))
    decay = _decay(optimizer, rates)
    if not pairs and last_norm is not None and type(optimizer) is SGD:
        parameters = [
            p.detach()
            for group in optimizer.param_groups
            for p in group["params"]
            if _plain(p.data)
        ]
        total = _norm(parameters)
        return max(rates, default=0.0) * last_norm / total + decay if total else None
    moved, weights = (_norm([pair[side] for pair in pairs]) for side in (0, 1))
    ratio = moved / weights + decay if weights else math.nan
    return ratio if math.isfinite(ratio) else None


def _decay(optimizer: Optimizer, rates: Sequence[float]) -> float:
    """What weight decay alone takes off the weights."""
    groups = zip(optimizer.param_groups, rates, strict=False)
    return max(
        (rate * float(group.get("weight_decay") or 0.0) for group, rate in groups), default=0.0
    )


def lost_squares(optimizer: Optimizer) -> int:
    """Elements with a mean gradient but no mean square of it, which no training leaves behind: the
    mean over 0 is huge.

    Small squares vanish when a checkpoint keeps them in half precision. Those of gradients so small
    that the square is 0 in its own dtype are not counted.
    """
    found = 0
    for state in optimizer.state.values():
        mean, square = (
            (state.get(slot) for slot in ("exp_avg", "exp_avg_sq"))
            if isinstance(state, dict)
            else (None, None)
        )
        if _plain(mean) and _plain(square) and mean.shape == square.shape:
            representable = mean.abs() > math.sqrt(torch.finfo(square.dtype).tiny) * FAR_ABOVE
            found += int(((square == 0) & representable).sum())
    return found


def _updates(optimizer: Optimizer, rates: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            update = _direction(group, state) if isinstance(state, Mapping) else None
            if update is not None and math.isfinite(rate):
                yield rate * update, parameter.detach()


def _direction(group: dict[str, Any], state: Mapping[str, Any]) -> Tensor | None:
    """Adam's step from its moments, SGD's from its momentum; for a rate of 1."""
    mean, square, betas = state.get("exp_avg"), state.get("exp_avg_sq"), group.get("betas", ())
    if _plain(mean) and _plain(square) and mean.shape == square.shape and len(betas) == 2:
        steps = max(1.0, float(state.get("step", 1.0)))
        first, second = (1.0 - float(beta) ** steps for beta in betas)
        made: Tensor = (
            mean.float()
            / first
            / ((square.float() / second).sqrt() + float(group.get("eps", 1e-8)))
        )
        return made
    momentum = state.get("momentum_buffer")
    return momentum.float() if _plain(momentum) else None


def _plain(value: Any) -> TypeGuard[Tensor]:
    """Not sharded (a norm would be a collective), not sparse, not complex."""
    return type(value) is Tensor and value.layout is torch.strided and value.is_floating_point()


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(
        sum(float(torch.linalg.vector_norm(tensor.float())) ** 2 for tensor in tensors)
    )
