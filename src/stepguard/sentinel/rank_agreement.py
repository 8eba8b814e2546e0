"""Make every rank see the same step. Three ways, chosen once:

alone       one process.
spread      DistributedDataParallel: its own gradient reduction carries a NaN to every rank, so no
            collective is added. What only one rank can see (its loss, its norm statistics) is put
            into a gradient before the reduction.
collective  anything else: one small MAX reduction a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.tensors.torch_private import default_store
from stepguard.tensors.values import is_finite

Mode = Literal["alone", "spread", "collective"]
CARRIERS = 3
"""Parameters that carry a rank's own trouble into the reduction; one may get no gradient."""
REDUCED = 4
"""Numbers a rank contributes to the reduction of a step."""
_numbers = itertools.count()
"""Guards are built in the same order on every rank: their number means the same on all."""


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class RankFault(RuntimeError):  # noqa: N818 (a fault of the guard, told to the other ranks)
    """The guard failed on one rank, so no rank can continue to guard."""


class Agreement:
    """Lets the ranks of one guard come to the same reading."""

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.size = world()
        self.mode: Mode = "alone"
        if self.size > 1:
            self.mode = "spread" if isinstance(model, DistributedDataParallel) else "collective"
        self._reduced = -1
        self._shared: Tensor | None = None
        """The last reduction, equal on all ranks."""
        self._left = f"stepguard/disarmed/{next(_numbers)}"
        self._cell: Tensor | None = None
        self._hooks = self._carry(model) if self.mode == "spread" else []

    def announce(self, local: Sequence[Tensor]) -> None:
        """Before backward: let a non-finite value of this rank reach the others by gradients."""
        if self._cell is None or not local:
            return
        total = torch.stack([v.detach().reshape(()).to(self._cell) for v in local]).sum()
        # 0 * x + 1 keeps NaN (0 * inf is NaN, too) and is exactly 1 otherwise.
        self._cell.copy_(total * 0.0 + 1.0)

    def announced(self) -> None:
        """After backward: the gradients carry it, a later backward must not carry it again."""
        if self._cell is not None:
            self._cell.fill_(1.0)

    @torch.no_grad()
    def reduce(self, values: Tensor, step: int) -> Tensor | None:
        """Return largest finite values and non-finite flags over all ranks; None if not needed."""
        if self.mode != "collective":
            return None
        self._reduced = step
        flags = (~torch.isfinite(values)).to(values.dtype)
        numbers = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        # Not every backend has MAX for float64; float32 is enough for flags and to compare losses.
        both = torch.cat([numbers, flags]).to(torch.float32)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        self._shared = both
        return both

    def together(self, look: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what every rank found, by rank. Called only when all ranks know of a bad step.

        A rank whose `look` fails still takes part, so that no rank waits for it; then all raise.
        """
        if self.size == 1:
            return [look()]
        self._refuse_if_left()
        try:
            mine: tuple[str, dict[str, Any]] = "", look()
        except Exception as fault:
            mine = f"{type(fault).__name__}: {fault}", {}
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine)
        for rank, (why, _) in enumerate(gathered):
            if why:
                raise RankFault(f"rank {rank}: {why}")
        return [facts for _, facts in gathered]

    def leave(self) -> None:
        """Tell the other ranks that this one is disarmed, so that they do not wait for it."""
        self.close()
        if self.size > 1:
            default_store().set(self._left, str(self.rank))

    def stay(self, step: int, parameters: Sequence[Tensor]) -> bool:
        """Take part in a step as a disarmed rank. True if no rank may update.

        The other ranks refuse such a step; a rank that took it would have other weights from then
        on, with NaN in them.
        """
        if self.mode == "alone":
            return False
        bad = not all(p.grad is None or is_finite(p.grad) for p in parameters)
        if self.mode == "spread":
            # Reduced already: every rank has the same gradients.
            return bad
        # After a rewind the last reduced step may be a later one.
        if self._reduced != step:
            own = torch.nan if bad else 0.0
            self.reduce(torch.full((REDUCED,), own, device=parameters[0].device), step)
        return self._shared is not None and bool(self._shared[REDUCED:].any())

    def _refuse_if_left(self) -> None:
        store = default_store()
        if store.check([self._left]):
            raise RankFault(f"rank {store.get(self._left).decode()} has disarmed itself")

    def close(self) -> None:
        """Remove the hooks from the model's parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _carry(self, model: nn.Module) -> list[Any]:
        trainable = sorted(
            (p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel()
        )
        if not trainable:
            return []
        self._cell = torch.ones((), device=trainable[0].device)
        cell = self._cell

        def carry(grad: Tensor) -> Tensor:
            # Times 1 leaves a healthy gradient bit-identical.
            return grad * cell.to(grad)

        # So that saving the parameter does not warn of the hook.
        carry.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return [p.register_hook(carry) for p in trainable[:CARRIERS]]  # type: ignore[no-untyped-call]
