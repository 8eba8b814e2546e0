"""Memory for the output gradients of a watched model, used again step after step.

Holding on to the gradient itself would be simpler, but keeps its memory from the rest of the backward: on a CPU the
layers below then take other pages than without a guard. A copy costs one pass over the gradient. An accelerator's
allocator keeps its own memory, so there the gradient is held.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

SMALL = 1 << 20
"""Bytes below which a gradient is held as it is."""


class Shelf:
    """Copies of large gradients. Memory is lent again once nobody has the copy any more."""

    def __init__(self) -> None:
        self._lent: list[tuple[Tensor, weakref.ref[Tensor]]] = []

    def keep(self, gradient: Tensor) -> Tensor:
        """The gradient, or a copy of it with the same strides: a replay then takes the same kernels."""
        if gradient.device.type != "cpu" or gradient.layout is not torch.strided or gradient.nbytes < SMALL:
            return gradient
        if not torch.ops.aten.is_non_overlapping_and_dense(gradient):  # expanded: it keeps less than a copy would
            return gradient
        memory = self._memory(gradient.nbytes)
        copy = memory[: gradient.nbytes].view(gradient.dtype).as_strided(gradient.shape, gradient.stride())
        self._lent.append((memory, weakref.ref(copy)))
        return copy.copy_(gradient)

    def _memory(self, size: int) -> Tensor:
        """Given back and large enough, or new. What is too small for this model goes."""
        free = [memory for memory, copy in self._lent if copy() is None]
        self._lent = [(memory, copy) for memory, copy in self._lent if copy() is not None]
        fitting = [memory for memory in free if memory.nbytes >= size]
        self._lent += [(memory, _nobody) for memory in fitting[1:]]
        return fitting[0] if fitting else torch.empty(size, dtype=torch.uint8)

    def clear(self) -> None:
        """Forget all memory; copies that are still held keep theirs."""
        self._lent.clear()


def _gone() -> weakref.ref[Tensor]:
    return weakref.ref(torch.empty(0))


_nobody = _gone()
"""A reference to a tensor that is gone already."""
