"""Remember buffers (and attributes of modules) before a step, and put them back after a veto.

The forward pass changes them, so a vetoed step must put them back. Norm layers change theirs
without raising the tensor's version counter, so they are copied in every step, as are small
buffers. Large ones (position tables, masks) are copied once and again only when their version
counter moved.

Not covered: a large buffer that is written through `.data` (the counter does not see it) keeps what
the step left, and a buffer registered under a new name during the step stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepguard.state.attributes import AttributeKeeper
from stepguard.state.plain_data import SMALL
from stepguard.tensors.torch_private import foreach_copy_
from stepguard.tensors.values import is_expanded, is_lazy
from stepguard.tensors.versions import versions, written_since


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

    `small`: elements up to which a buffer is copied whatever its version counter says.
    """

    def __init__(self, modules: Iterable[nn.Module], *, small: int = SMALL) -> None:
        self._roots = tuple(modules)
        self._small = small
        self._places: list[_Place] = []
        self._statistics: list[_Place] = []
        self._copies: list[_Copy] = []
        self._count = -1
        self._marked: list[Tensor] = []
        self._marks: list[int] = []
        self._attributes = AttributeKeeper()

    def remember(self) -> None:
        """Take the present values, by in-place copies into memory that is allocated once."""
        modules = self._modules()
        self._attributes.remember(modules)
        if self._registered_otherwise(modules):
            self._start_over(modules)
            return
        stale = [c for c in self._copies if c.always or c.moved]
        if not stale:
            return
        foreach_copy_([c.saved for c in stale], [c.live.detach() for c in stale])
        for copy in stale:
            copy.version = copy.live._version

    def _start_over(self, modules: list[nn.Module]) -> None:
        self._places = []
        for module in modules:
            for key, buffer in module._buffers.items():
                self._places.append(_Place(module, key, buffer))
        self._statistics = [place for place in self._places if keeps_statistics(place.owner)]
        self._copies = _copies(self._places, self._small)
        self._count = len(self._places)

    def statistics(self) -> list[Tensor]:
        """Return the running statistics of norm layers as they are, without walking the model."""
        live = [place.owner._buffers.get(place.key) for place in self._statistics]
        return [buffer for buffer in live if buffer is not None and buffer.is_floating_point()]

    def mark(self) -> None:
        """Start observing for `norms_ran`."""
        self._marked = [
            place.buffer
            for place in self._statistics
            if place.buffer is not None and _is_batch_counter(place.buffer)
        ]
        self._marks = versions(self._marked)

    def norms_ran(self) -> bool:
        """Has a norm layer run since `mark`? Its batch counter is written in place."""
        return bool(written_since(self._marked, self._marks))

    def restore(self) -> None:
        """Go back to what `remember` took, the same tensor objects included."""
        self._attributes.restore()
        for place in self._places:
            place.owner._buffers[place.key] = place.buffer
        with torch.no_grad():
            for copy in self._copies:
                if copy.always or copy.moved:
                    copy.live.copy_(copy.saved)
                    copy.version = copy.live._version

    def written(self) -> list[Tensor]:
        """Return the floating-point buffers written or replaced since `remember`.

        Those of norm layers are left out: `statistics` gives them, and their counters do not show
        it. Does not walk the model.
        """
        changed = [copy.live for copy in self._copies if copy.moved and not copy.silent]
        changed += [buffer for _, buffer in self._replaced()]
        return [buffer for buffer in changed if buffer.is_floating_point()]

    def written_at(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Return what `written` does, with the place of each: its module's id and its name."""
        moved = {id(copy.live) for copy in self._copies if copy.moved and not copy.silent}
        changed = self._replaced()
        if moved:
            for place in self._places:
                if place.buffer is not None and id(place.buffer) in moved:
                    changed.append((place, place.buffer))
        return [
            ((id(place.owner), place.key), buffer)
            for place, buffer in changed
            if buffer.is_floating_point()
        ]

    def _replaced(self) -> list[tuple[_Place, Tensor]]:
        """Buffers that are another tensor than the one that was remembered."""
        found: list[tuple[_Place, Tensor]] = []
        for place in self._places:
            present = place.owner._buffers.get(place.key)
            if present is not None and present is not place.buffer:
                found.append((place, present))
        return found

    def changing(self) -> bool:
        """Has a forward pass changed anything since `remember`? Norm layers are presumed to."""
        if any(c.silent or c.moved for c in self._copies):
            return True
        return self._registered_otherwise(self._modules()) or self._attributes.moved()

    def as_remembered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors by name, with what `remember` took in place of every live buffer."""
        # By address: detached references share their memory with the buffer, not its identity.
        taken = {copy.live.data_ptr(): copy.saved for copy in self._copies if copy.live.numel()}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            saved = taken.get(tensor.data_ptr()) if tensor.numel() else None
            if saved is not None and saved.shape == tensor.shape:
                found[name] = saved
            else:
                found[name] = tensor
        return found

    def remembered(self, buffer: Tensor) -> Tensor:
        """Return what `remember` took of this buffer; itself if nothing was taken."""
        for copy in self._copies:
            if copy.live is buffer:
                return copy.saved
        return buffer

    def _modules(self) -> list[nn.Module]:
        """List every module once. `nn.Module.modules` takes several times as long."""
        found: list[nn.Module] = []
        waiting = list(self._roots)
        seen: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            found.append(module)
            waiting.extend(child for child in module._modules.values() if child is not None)
        return found

    def _registered_otherwise(self, modules: list[nn.Module]) -> bool:
        """Were buffers registered, removed or replaced since the places were listed?"""
        if sum(len(m._buffers) for m in modules) != self._count:
            return True
        return any(p.owner._buffers.get(p.key) is not p.buffer for p in self._places)


def keeps_statistics(module: nn.Module) -> bool:
    """Is it a norm layer whose running statistics change in the forward pass?"""
    return bool(getattr(module, "track_running_stats", False))


def _is_batch_counter(buffer: Tensor) -> bool:
    # Inference tensors have no version counter.
    return not buffer.is_floating_point() and not buffer.is_inference()


def _copies(places: list[_Place], small: int) -> list[_Copy]:
    """Copy each tensor once, however many places it has."""
    copies: dict[int, _Copy] = {}
    for place in places:
        buffer = place.buffer
        if buffer is None or is_lazy(buffer) or buffer.is_nested:
            continue
        if id(buffer) in copies or is_expanded(buffer):
            continue
        silent = keeps_statistics(place.owner)
        always = silent or buffer.numel() <= small
        saved = buffer.detach().clone()
        copies[id(buffer)] = _Copy(buffer, saved, buffer._version, always, silent)
    return list(copies.values())
