"""Buffers (and attributes of modules) change in the forward pass, so a vetoed step must put them
back; kept cheap here.

Norm layers change theirs without raising the tensor's version counter, so they are copied every
step, as are small buffers. Large ones (position tables, masks) are copied once and again only when
their version counter moved.

Not covered: a large buffer that is written through `.data` (the counter does not see it) keeps what
the step left, and a buffer registered under a new name during the step stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from stepguard.state.attributes import AttributeKeeper
from stepguard.state.kept_values import SMALL
from stepguard.tensors.torch_private import foreach_copy_
from stepguard.tensors.values import is_expanded, is_lazy


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
    """Copied whatever its version counter says."""
    silent: bool
    """A norm layer's statistics: they change without raising the version counter."""

    @property
    def moved(self) -> bool:
        return self.live._version != self.version


class BufferKeeper:
    """Remembers every buffer of some modules at one moment and can go back to it.

    `small` is the number of elements up to which a buffer is copied whatever its version counter
    says.
    """

    def __init__(self, modules: Iterable[nn.Module], *, small: int = SMALL) -> None:
        self._modules = tuple(modules)
        self._small = small
        self._places: list[_Place] = []
        self._statistics: list[_Place] = []
        self._copies: list[_Copy] = []
        self._count = -1
        self._marks: list[tuple[Tensor, int]] = []
        self._attributes = AttributeKeeper()

    def remember(self) -> None:
        """Take the present values. In-place copies into memory allocated once."""
        owners = list(self._owners())
        self._attributes.remember(owners)
        if self._changed_layout(owners):
            self._places = [
                _Place(m, key, buffer) for m in owners for key, buffer in m._buffers.items()
            ]
            self._statistics = [place for place in self._places if keeps_statistics(place.owner)]
            self._copies = _copies(self._places, self._small)
            self._count = len(self._places)
            return
        stale = [c for c in self._copies if c.always or c.moved]
        if stale:
            foreach_copy_([c.saved for c in stale], [c.live.detach() for c in stale])
            for copy in stale:
                copy.version = copy.live._version

    def statistics(self) -> list[Tensor]:
        """Running statistics of norm layers as they are now, without walking the model again."""
        live = [place.owner._buffers.get(place.key) for place in self._statistics]
        return [buffer for buffer in live if buffer is not None and buffer.is_floating_point()]

    def mark(self) -> None:
        """From here on `norms_ran` tells."""
        self._marks = [
            (place.buffer, place.buffer._version)
            for place in self._statistics
            if _counts(place.buffer)
        ]

    def norms_ran(self) -> bool:
        """Has a norm layer run since `mark`? Its counter is the one buffer whose version it raises."""
        return any(buffer._version != version for buffer, version in self._marks)

    def restore(self) -> None:
        """Back to what `remember` took, the same tensor objects included."""
        self._attributes.restore()
        for place in self._places:
            place.owner._buffers[place.key] = place.buffer
        with torch.no_grad():
            for copy in self._copies:
                if copy.always or copy.moved:
                    copy.live.copy_(copy.saved)
                    copy.version = copy.live._version

    def written(self) -> list[Tensor]:
        """Buffers of real numbers that were written in place or replaced since `remember`, without
        walking the model.

        Those of norm layers are left out: `statistics` gives them, and their counters do not show
        it.
        """
        moved = [copy.live for copy in self._copies if copy.moved and not copy.silent]
        live = ((place, place.owner._buffers.get(place.key)) for place in self._places)
        moved += [
            buffer for place, buffer in live if buffer is not None and buffer is not place.buffer
        ]
        return [buffer for buffer in moved if buffer.is_floating_point()]

    def changing(self) -> bool:
        """Has a forward pass changed anything since `remember`? A norm layer is presumed to have."""
        if any(c.silent or c.moved for c in self._copies):
            return True
        return self._changed_layout(list(self._owners())) or self._attributes.moved()

    def as_remembered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors by name, with what `remember` took in the place of every live buffer."""
        taken = {copy.live.data_ptr(): copy.saved for copy in self._copies if copy.live.numel()}

        def before(tensor: Tensor) -> Tensor:
            saved = taken.get(tensor.data_ptr()) if tensor.numel() else None
            return saved if saved is not None and saved.shape == tensor.shape else tensor

        return {name: before(tensor) for name, tensor in tensors.items()}

    def remembered(self, buffer: Tensor) -> Tensor:
        """What `remember` took of this buffer; itself where nothing was taken."""
        return next((c.saved for c in self._copies if c.live is buffer), buffer)

    def _owners(self) -> Iterator[nn.Module]:
        """Every module once. Asked for at every step, and `nn.Module.modules` takes several times
        as long.
        """
        waiting, seen = list(self._modules), set[int]()
        while waiting:
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                waiting.extend(child for child in module._modules.values() if child is not None)

    def _changed_layout(self, owners: list[nn.Module]) -> bool:
        if sum(len(m._buffers) for m in owners) != self._count:
            return True
        return any(
            place.owner._buffers.get(place.key) is not place.buffer for place in self._places
        )


def keeps_statistics(module: nn.Module) -> bool:
    """Is it a norm layer whose running statistics change in the forward pass?"""
    return bool(getattr(module, "track_running_stats", False))


def _counts(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return buffer is not None and not buffer.is_floating_point() and not buffer.is_inference()


def _copies(places: list[_Place], small: int) -> list[_Copy]:
    """One copy a tensor, however many places it has."""
    copies: dict[int, _Copy] = {}
    for place in places:
        buffer = place.buffer
        if buffer is None or is_lazy(buffer) or buffer.is_nested:
            continue
        if id(buffer) not in copies and not is_expanded(buffer):
            silent = keeps_statistics(place.owner)
            always = silent or buffer.numel() <= small
            copies[id(buffer)] = _Copy(
                buffer, buffer.detach().clone(), buffer._version, always, silent
            )
    return list(copies.values())
