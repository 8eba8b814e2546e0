"""Buffers change in the forward pass, so a vetoed step must put them back; this keeps that cheap.

Norm layers change theirs without raising the tensor's version counter, so they are copied every step, as are small
buffers. Large ones (position tables, masks) are copied once and again only when their version counter moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SMALL = 65536
"""Elements up to which a buffer is copied every step whatever its version counter says."""


@dataclass(slots=True)
class _Slot:
    owner: nn.Module
    key: str
    live: Tensor
    saved: Tensor
    version: int
    always: bool


class BufferKeeper:
    """Remembers every buffer of some modules at one moment and can go back to it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._slots: list[_Slot] = []
        self._count = -1

    def remember(self) -> None:
        """Take the present values. In-place copies into memory allocated once."""
        if self._changed_layout():
            self._slots = self._all_slots()
            return
        stale = [s for s in self._slots if s.always or s.live._version != s.version]
        if stale:
            torch._foreach_copy_([s.saved for s in stale], [s.live.detach() for s in stale])
            for slot in stale:
                slot.version = slot.live._version

    def restore(self) -> None:
        """Back to what `remember` took, the same tensor objects included."""
        with torch.no_grad():
            for slot in self._slots:
                slot.owner._buffers[slot.key] = slot.live
                slot.live.copy_(slot.saved)
                slot.version = slot.live._version

    def _changed_layout(self) -> bool:
        if sum(len(m._buffers) for root in self._modules for m in root.modules()) != self._count:
            return True
        return any(slot.owner._buffers.get(slot.key) is not slot.live for slot in self._slots)

    def _all_slots(self) -> list[_Slot]:
        slots, seen, self._count = [], set(), 0
        for root in self._modules:
            for module in root.modules():
                self._count += len(module._buffers)
                for key, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        slots.append(_slot(module, key, buffer))
        return slots


def keeps_statistics(module: nn.Module) -> bool:
    """Is it a norm layer whose running statistics change in the forward pass?"""
    return bool(getattr(module, "track_running_stats", False))


def _slot(module: nn.Module, key: str, buffer: Tensor) -> _Slot:
    always = keeps_statistics(module) or buffer.numel() <= SMALL
    return _Slot(module, key, buffer, buffer.detach().clone(), buffer._version, always)
