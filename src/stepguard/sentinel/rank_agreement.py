"""Making every rank see the same step. Three ways, chosen once:

alone       one process.
spread      DistributedDataParallel: its own gradient reduction carries a NaN to every rank, so no
collective is added.
            What only one rank can see (its loss, its norm statistics) is put into a gradient before
            the reduction.
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
"""Parameters that carry a rank's own trouble into the reduction; more than one in case one gets no
gradient.
"""


REDUCED = 4
"""Numbers a rank contributes to the reduction of a step."""
_numbers = itertools.count()
"""Guards are built in the same order on every rank, so their number is a name that all know."""


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class RankFault(RuntimeError):  # noqa: N818 (it is a fault of the guard on some rank, told to the others)
    """The guard failed on some rank, so that no rank can go on guarding."""


class Agreement:
    """How the ranks of one guard come to the same reading."""

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.size = world()
        self.mode: Mode = "alone"
        if self.size > 1:
            self.mode = "spread" if isinstance(model, DistributedDataParallel) else "collective"
        self._reduced = -1
        self._shared: Tensor | None = None
        """What all ranks saw of the last reduced step."""
        self._left = f"stepguard/disarmed/{next(_numbers)}"
        self._cell: Tensor | None = None
        self._hooks = self._carry(model) if self.mode == "spread" else []

    def announce(self, local: Sequence[Tensor]) -> None:
        """Before backward: let a non-finite value of this rank reach the others with the gradients."""
        if self._cell is not None and local:
            total = torch.stack([v.detach().reshape(()).to(self._cell) for v in local]).sum()
            # 1 where finite: 0 * x + 1 keeps NaN (0 * inf is NaN too) and is exactly 1 otherwise
            self._cell.copy_(total * 0.0 + 1.0)

    def announced(self) -> None:
        """After backward: the gradients carry it now, and a later backward must not carry it again."""
        if self._cell is not None:
            self._cell.fill_(1.0)

    @torch.no_grad()
    def reduce(self, values: Tensor, step: int) -> Tensor | None:
        """The largest finite values and the non-finite flags over all ranks; None where no
        reduction is needed.
        """
        if self.mode != "collective":
            return None
        self._reduced = step
        flags = (~torch.isfinite(values)).to(values.dtype)
        # float64 MAX is not on every backend; float32 is enough for flags and for comparing losses
        both = torch.cat([torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), flags]).to(
            torch.float32
        )
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        self._shared = both
        return both

    def together(self, look: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What every rank found, by rank. Only called once all ranks know that the step is bad.

        A rank whose look fails still takes part, so that nobody waits for it; then all raise.
        """
        if self.size == 1:
            return [look()]
        self._refuse_if_left()
        try:
            mine: tuple[str, dict[str, Any]] = "", look()
        except Exception as fault:
            mine = f"{type(fault).__name__}: {fault}", {}
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine)
        for rank, (why, _) in enumerate(everybody):
            if why:
                raise RankFault(f"rank {rank}: {why}")
        return [facts for _, facts in everybody]

    def leave(self) -> None:
        """This rank is disarmed: the others must not wait for it at the next bad step."""
        self.close()
        if self.size > 1:
            default_store().set(self._left, str(self.rank))

    def stay(self, step: int, parameters: Sequence[Tensor]) -> bool:
        """The part of a disarmed rank in a step of all. True where no rank may update, by what
        every rank sees.

        The others refuse such a step; one rank that took it would have other weights from then on,
        with NaN in them.
        """
        if self.mode == "alone":
            return False
        bad = not all(p.grad is None or is_finite(p.grad) for p in parameters)
        if self.mode == "spread":
            return bad  # reduced already: the same gradients on every rank
        if self._reduced != step:  # after a rewind it may be a later one
            own = torch.nan if bad else 0.0
            self.reduce(torch.full((REDUCED,), own, device=parameters[0].device), step)
        return self._shared is not None and bool(self._shared[REDUCED:].any())

    def _refuse_if_left(self) -> None:
        store = default_store()
        if store.check([self._left]):
            raise RankFault(f"rank {store.get(self._left).decode()} has disarmed itself")

    def close(self) -> None:
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
            return grad * cell.to(grad)  # times 1 leaves a healthy gradient bit-identical

        carry.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving the parameter does not warn
        return [p.register_hook(carry) for p in trainable[:CARRIERS]]  # type: ignore[no-untyped-call]
