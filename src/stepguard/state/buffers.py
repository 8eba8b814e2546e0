"""Buffers (and plain counters) change in the forward pass, so a vetoed step must put them back; this keeps it cheap.

Norm layers change theirs without raising the tensor's version counter, so they are copied every step, as are small
buffers. Large ones (position tables, masks) are copied once and again only when their version counter moved.

Not covered: a large buffer that is written through `.data` (the counter does not see it) keeps what the step left, and
a buffer registered under a new name during the step stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepguard.state.counters import CounterKeeper

SMALL = 65536
"""Elements up to which a buffer is copied every step whatever its version counter says."""


@dataclass(slots=True)
class _Place:
    """Where a buffer is registered. It may be None, and one tensor may have several places."""

    owner: nn.Module
    key: str
    buffer: Tensor | None


@dataclass(slots=True)
class _Copy:
    live: Tensor
    saved: Tensor
    version: int
    always: bool


class BufferKeeper:
    """Remembers every buffer of some modules at one moment and can go back to it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._places: list[_Place] = []
        self._copies: list[_Copy] = []
        self._count = -1
        self._counters = CounterKeeper(self._modules)

    def remember(self) -> None:
        """Take the present values. In-place copies into memory allocated once."""
        self._counters.remember()
        if self._changed_layout():
            self._places = [_Place(m, key, buffer) for m in self._owners() for key, buffer in m._buffers.items()]
            self._copies = _copies(self._places)
            self._count = len(self._places)
            return
        stale = [c for c in self._copies if c.always or c.live._version != c.version]
        if stale:
            torch._foreach_copy_([c.saved for c in stale], [c.live.detach() for c in stale])
            for copy in stale:
                copy.version = copy.live._version

    def restore(self) -> None:
        """Back to what `remember` took, the same tensor objects included."""
        self._counters.restore()
        for place in self._places:
            place.owner._buffers[place.key] = place.buffer
        with torch.no_grad():
            for copy in self._copies:
                if copy.always or copy.live._version != copy.version:
                    copy.live.copy_(copy.saved)
                    copy.version = copy.live._version

    def written(self) -> list[Tensor]:
        """Buffers that were written in place, replaced or added since `remember`, as far as counters show it."""
        written = [copy.live for copy in self._copies if copy.live._version != copy.version]
        before = {id(place.buffer) for place in self._places}
        present = (buffer for module in self._owners() for buffer in module._buffers.values())
        return written + [buffer for buffer in present if buffer is not None and id(buffer) not in before]

    def _owners(self) -> Iterator[nn.Module]:
        return (module for root in self._modules for module in root.modules())

    def _changed_layout(self) -> bool:
        if sum(len(m._buffers) for m in self._owners()) != self._count:
            return True
        return any(place.owner._buffers.get(place.key) is not place.buffer for place in self._places)


def keeps_statistics(module: nn.Module) -> bool:
    """Is it a norm layer whose running statistics change in the forward pass?"""
    return bool(getattr(module, "track_running_stats", False))


def _copies(places: list[_Place]) -> list[_Copy]:
    """One copy a tensor, however many places it has."""
    copies: dict[int, _Copy] = {}
    for place in places:
        buffer = place.buffer
        if buffer is not None and id(buffer) not in copies and not _expanded(buffer):
            always = keeps_statistics(place.owner) or buffer.numel() <= SMALL
            copies[id(buffer)] = _Copy(buffer, buffer.detach().clone(), buffer._version, always)
    return list(copies.values())


def _expanded(buffer: Tensor) -> bool:
    """A view that repeats its elements cannot be written in place, neither by the user nor by us."""
    if buffer.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
