"""The numbers of a step that ranks reduce together, and what they mean once they are read.

Ranks with whole gradients exchange the largest of each. Ranks of a sharded model add: each has
measured its own part of the gradients, and the square root of the sum is the norm of them all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.seen_alone import SeenAlone
from stepguard.sentinel.gradients import GradientNorm
from stepguard.sentinel.rank_agreement import REDUCED

SQUARES, WITH_LOSS = 1, 2
"""Where the sums of ranks hold the square of the norm and the number of losses."""


class RankNumbers:
    """Four numbers of every rank, always the same ones, in one reduction."""

    def __init__(self, context: Context, alone: SeenAlone) -> None:
        self._context = context
        self._alone = alone

    def reduced(
        self, loss: Tensor | None, named: dict[str, Tensor], norm: GradientNorm | None
    ) -> list[Tensor]:
        """What all ranks saw, where that takes a reduction."""
        agreement = self._context.agreement
        if agreement.mode != "collective":
            return []
        state = self._alone.rate()
        if state is None:
            state = named.get("state")
        local = [loss, named.get("norm"), named.get("buffers"), state]
        device = torch.device("cpu")
        for value in local:
            if value is not None:
                device = value.device
                break
        zero = torch.zeros((), device=device)
        line = [zero if v is None else v.detach().reshape(()).to(zero) for v in local]
        values = torch.stack(line)
        risk = self._alone.risk(values, named.get("least"))
        sums = _sums(values, norm, has_loss=loss is not None) if agreement.adds else None
        shared = agreement.reduce(values, self._context.step, risk, sums)
        if shared is None:
            return []
        return list(shared.unbind())

    def loss(self, shared: list[float]) -> float | None:
        """The largest loss of all ranks; of a sharded model their mean."""
        if not shared:
            return None
        if not self._context.agreement.adds:
            return shared[0]
        return shared[0] / shared[WITH_LOSS] if shared[WITH_LOSS] else None

    def norm(
        self, measured: GradientNorm | None, own: float | None, shared: list[float]
    ) -> float | None:
        """The norm of gradients of which each rank has measured its part, once all are finite."""
        parts = measured is not None and measured.squares is not None
        if not parts or not shared or shared[REDUCED + SQUARES]:
            return own
        return math.sqrt(shared[SQUARES])


def _sums(values: Tensor, norm: GradientNorm | None, *, has_loss: bool) -> Tensor:
    """What ranks of a sharded model add: losses, squares of their parts, and how many losses."""
    sums = values.to(torch.float64, copy=True)
    sums[SQUARES] = 0.0
    if norm is not None and norm.squares is not None:
        sums[SQUARES] = norm.squares
    sums[WITH_LOSS] = torch.isfinite(values[0]).to(sums) if has_loss else 0.0
    return sums
