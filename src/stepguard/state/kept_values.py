"""Remember what a value was at one moment: numbers, tensors, arrays, containers, plain objects.

Each kind of value has a class that can remember again (`refresh`), tell whether the value has moved
since, and put it back (`restore`), in the very objects that were there. Values that are not data
(functions, modules, files, locks) are left alone, and so is an object that holds any of those.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.state.plain_data import (
    ATOMS,
    DEEPEST,
    MANY,
    SMALL,
    UNCHANGING,
    WithoutGraph,
    has_attributes,
    has_graph,
    holds_only_data,
    is_array,
    is_data,
    is_torchs,
    original,
)
from stepguard.tensors.sharding import is_distributed
from stepguard.tensors.values import PLAIN, is_expanded, local_part

NUMBERS = "biufc"
"""Kinds of numpy dtypes that are numbers."""
NOTHING: frozenset[str] = frozenset()
Seen = set[int]


class KeptValue(Protocol):
    """One value that can change in place. `seen` holds the ids of those already visited."""

    def refresh(self, seen: Seen) -> None: ...
    def moved(self, seen: Seen) -> bool: ...
    def restore(self, seen: Seen) -> None: ...


class Scope:
    """What is remembered: small values of a module in every step, or all of an optimizer once."""

    def __init__(self, *, everything: bool = False, room: int = 2**24) -> None:
        self.everything = everything
        self._room = room
        self._kept: dict[int, object] = {}

    def knows(self, value: object) -> bool:
        """True if everything is remembered once and this value already is."""
        if not self.everything:
            return False
        known = id(value) in self._kept
        # Held, so that no other object gets its id.
        self._kept[id(value)] = value
        return known

    def copies(self, tensor: Tensor) -> bool:
        """Is the content of this tensor copied?"""
        if not _can_be_copied(tensor):
            return False
        if self.everything:
            return True
        # A parameter is the optimizer's; a tensor with a history is made by every forward pass.
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return False
        size = tensor.numel()
        if size > self._room:
            return False
        if size > SMALL:
            self._room -= size
        return True

    def takes(self, count: int) -> bool:
        """Is a container of this many entries copied?"""
        return self.everything or count <= MANY

    def follows(self, value: object) -> bool:
        """Are the attributes of this object remembered?"""
        if isinstance(value, Optimizer):
            return self.everything
        if isinstance(value, type | nn.Module) or callable(value) or is_torchs(value):
            return False
        if not has_attributes(value):
            return False
        return self.everything or holds_only_data(value)


def _can_be_copied(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    if tensor.is_inference() or tensor.is_meta:
        return False
    return tensor.is_contiguous() or not is_expanded(tensor)


def keep(value: Any, scope: Scope, depth: int = 0) -> KeptValue | None:
    """Remember one value; None for what cannot change in place or is left alone."""
    if depth > DEEPEST or scope.knows(value):
        return None
    if isinstance(value, Tensor):
        if is_distributed(value):
            # What this rank holds of it, in the same memory: the rest is kept where it is.
            value = local_part(value.detach())
        return KeptTensor(value, exact=scope.everything) if scope.copies(value) else None
    if isinstance(value, ATOMS):
        return None
    if isinstance(value, dict | list | deque | tuple | set):
        return _keep_container(value, scope, depth)
    if is_array(value):
        return _keep_array(value, scope)
    if scope.follows(value):
        return KeptMapping(vars(value), scope, depth, attributes=True)
    return None


def _keep_container(value: Any, scope: Scope, depth: int) -> KeptValue | None:
    if not scope.takes(len(value)):
        return KeptLength(value) if isinstance(value, dict | list | deque) else None
    if isinstance(value, dict):
        return KeptMapping(value, scope, depth)
    if isinstance(value, list | deque):
        return KeptSequence(value, scope, depth)
    if isinstance(value, tuple):
        return KeptTuple(value, scope, depth)
    return KeptSet(value)


def _keep_array(value: Any, scope: Scope) -> KeptValue | None:
    if value.dtype.kind not in NUMBERS:
        return None
    if value.size > SMALL and not scope.everything:
        return None
    return KeptArray(value)


class _KeptContainer:
    """Entries are held by reference; what can change inside them is remembered, too."""

    def __init__(self, live: Any, scope: Scope, depth: int) -> None:
        self._live = live
        self._scope = scope
        self._depth = depth
        self._children: list[KeptValue] = []
        self._take()

    def _take(self) -> None:
        """Keep what is there now; each kind of value has its own way."""
        raise NotImplementedError

    def _same(self) -> bool:
        """Does the container hold the very objects it held?"""
        raise NotImplementedError

    def _put_back(self) -> None:
        raise NotImplementedError

    def refresh(self, seen: Seen) -> None:
        if not _first_visit(self._live, seen):
            return
        if not self._same():
            self._take()
            return
        for child in self._children:
            child.refresh(seen)

    def moved(self, seen: Seen) -> bool:
        if not _first_visit(self._live, seen):
            return False
        return not self._same() or any(child.moved(seen) for child in self._children)

    def restore(self, seen: Seen) -> None:
        if not _first_visit(self._live, seen):
            return
        for child in self._children:
            child.restore(seen)
        if not self._same():
            self._put_back()

    def _remember_inside(self, values: Iterable[Any]) -> None:
        self._children = []
        for value in values:
            if type(value) in UNCHANGING:
                continue
            child = keep(value, self._scope, self._depth + 1)
            if child is not None:
                self._children.append(child)


class KeptMapping(_KeptContainer):
    """A dict, or the attributes of an object."""

    def __init__(
        self,
        live: dict[Any, Any],
        scope: Scope,
        depth: int = 0,
        *,
        attributes: bool = False,
        skip: frozenset[str] = NOTHING,
    ) -> None:
        self._attributes = attributes
        self._skip = skip
        super().__init__(live, scope, depth)

    def _take(self) -> None:
        self._items = dict(self._live)
        self._remember_inside(v for key, v in self._items.items() if key not in self._skip)
        for key, value in self._items.items():
            if has_graph(value):
                self._items[key] = WithoutGraph(value)

    def _same(self) -> bool:
        live = self._live
        items = self._items
        if len(live) != len(items):
            return False
        # map and is_ run in C: this is asked of every container in every step.
        return all(map(is_, live.values(), items.values())) and all(map(is_, live, items))

    def _put_back(self) -> None:
        before = {key: original(v, self._live.get(key)) for key, v in self._items.items()}
        if self._attributes:
            self._put_back_attributes(before)
            return
        self._live.clear()
        self._live.update(before)

    def _put_back_attributes(self, before: dict[Any, Any]) -> None:
        """Put back data only: a method or a hook that was replaced since stays."""
        for key, value in before.items():
            now = self._live.get(key)
            if key in self._skip or now is value:
                continue
            if is_data(value) and not callable(now):
                self._live[key] = value
        added = [key for key in self._live if key not in before]
        for key in added:
            if is_data(self._live[key]):
                del self._live[key]


class KeptSequence(_KeptContainer):
    """A list or a deque."""

    def _take(self) -> None:
        self._remember_inside(self._live)
        self._items = [WithoutGraph(v) if has_graph(v) else v for v in self._live]

    def _same(self) -> bool:
        return len(self._live) == len(self._items) and all(map(is_, self._live, self._items))

    def _put_back(self) -> None:
        before = [original(value, None) for value in self._items]
        self._live.clear()
        self._live.extend(before)


class KeptTuple(_KeptContainer):
    """A tuple cannot change itself; what is in it can."""

    def _take(self) -> None:
        self._remember_inside(self._live)

    def _same(self) -> bool:
        return True


class KeptSet:
    """A set, copied in every step."""

    def __init__(self, live: set[Any]) -> None:
        self._live = live
        self._items = set(live)

    def refresh(self, seen: Seen) -> None:
        self._items = set(self._live)

    def moved(self, seen: Seen) -> bool:
        return self._live != self._items

    def restore(self, seen: Seen) -> None:
        if self.moved(seen):
            self._live.clear()
            self._live.update(self._items)


class KeptLength:
    """A container too large to be copied in every step: entries added at its end are removed."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self._count = len(live)

    def refresh(self, seen: Seen) -> None:
        self._count = len(self._live)

    def moved(self, seen: Seen) -> bool:
        return len(self._live) != self._count

    def restore(self, seen: Seen) -> None:
        take_off = self._live.popitem if isinstance(self._live, dict) else self._live.pop
        while len(self._live) > self._count:
            take_off()


class KeptArray:
    """A numpy array. It has no version counter, so it is copied in every step."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self._saved = live.copy()

    def refresh(self, seen: Seen) -> None:
        self._saved[...] = self._live

    def moved(self, seen: Seen) -> bool:
        # Bytes, not ==: NaN differs from itself.
        return bool(self._live.tobytes() != self._saved.tobytes())

    def restore(self, seen: Seen) -> None:
        if self._live.flags.writeable:
            self._live[...] = self._saved


class KeptTensor:
    """A tensor, copied again only when its version counter moved.

    `exact`: compared by its values, since the counter does not see writes through `.data`.
    """

    def __init__(self, live: Tensor, *, exact: bool) -> None:
        self._live = live
        self._exact = exact
        self._saved = _copy(live)
        self._version = live._version

    def refresh(self, seen: Seen) -> None:
        if self._live._version == self._version:
            return
        self._version = self._live._version
        self._saved = _copy(self._live)

    def moved(self, seen: Seen) -> bool:
        if self._exact:
            return not _equal(self._live, self._saved)
        return self._live._version != self._version

    @torch.no_grad()
    def restore(self, seen: Seen) -> None:
        if not _first_visit(self._live, seen) or not self.moved(seen):
            return
        if self._live.shape != self._saved.shape:
            self._live.data = self._saved.to(self._live.device, copy=True)
        else:
            self._live.detach().copy_(self._saved)
        self._version = self._live._version


def _first_visit(live: object, seen: Seen) -> bool:
    """True once for each object: shared values are visited once, and circles end."""
    if id(live) in seen:
        return False
    seen.add(id(live))
    return True


def _copy(live: Tensor) -> Tensor:
    try:
        return live.detach().clone()
    except torch.OutOfMemoryError:
        # The device is full; main memory may not be.
        return live.detach().to("cpu", copy=True)


def _equal(live: Tensor, saved: Tensor) -> bool:
    # Some dtypes have no torch.equal; then the tensor counts as moved and is put back.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return live.shape == saved.shape and torch.equal(live.detach(), saved.to(live.device))
    return False
