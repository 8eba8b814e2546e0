"""Making every rank see the same step. Three ways, chosen once:

alone       one process.
spread      DistributedDataParallel: its own gradient reduction carries a NaN to every rank, so no collective is added.
            What only one rank can see (its loss, its norm statistics) is put into a gradient before the reduction.
collective  anything else: one small MAX reduction a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Mode = Literal["alone", "spread", "collective"]
CARRIERS = 3
"""Parameters that carry a rank's own trouble into the reduction; more than one in case one gets no gradient."""


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Agreement:
    """How the ranks of one guard come to the same reading."""

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.size = world()
        self.mode: Mode = "alone"
        if self.size > 1:
            self.mode = "spread" if isinstance(model, DistributedDataParallel) else "collective"
        self._cell: Tensor | None = None
        self._hooks = self._carry(model) if self.mode == "spread" else []

    def announce(self, local: Sequence[Tensor]) -> None:
        """Before backward: let a non-finite value of this rank reach the others with the gradients."""
        if self._cell is not None and local:
            total = torch.stack([v.detach().reshape(()).to(self._cell) for v in local]).sum()
            # 1 where finite: 0 * x + 1 keeps NaN (0 * inf is NaN too) and is exactly 1 otherwise
            self._cell.copy_(total * 0.0 + 1.0)

    @torch.no_grad()
    def reduce(self, values: Tensor) -> Tensor | None:
        """The largest finite values and the non-finite flags over all ranks; None where no reduction is needed."""
        if self.mode != "collective":
            return None
        flags = (~torch.isfinite(values)).to(values.dtype)
        # float64 MAX is not on every backend; float32 is enough for flags and for comparing losses
        both = torch.cat([torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), flags]).to(torch.float32)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return both

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Everybody's facts, by rank. Only called once all ranks know that the step is bad."""
        if self.size == 1:
            return [facts]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, facts)
        return everybody

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _carry(self, model: nn.Module) -> list[Any]:
        trainable = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel())
        if not trainable:
            return []
        self._cell = torch.ones((), device=trainable[0].device)
        cell = self._cell

        def carry(grad: Tensor) -> Tensor:
            return grad * cell.to(grad)  # times 1 leaves a healthy gradient bit-identical

        carry.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving the parameter does not warn
        return [p.register_hook(carry) for p in trainable[:CARRIERS]]  # type: ignore[no-untyped-call]
