"""What a value was at one moment, whatever it is made of: numbers, tensors, arrays, containers,
objects that hold them.

Each kind of value has a class that can look again (`refresh`), tell whether it has moved since, and
put it back (`restore`), in the very objects that were there. Values that are no data (functions,
modules, files, locks) are left alone, and so is an object that holds any of those.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.tensors.values import is_expanded

CONTAINERS = (dict, list, tuple, set, deque)
ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
UNCHANGING = frozenset({*ATOMS, bool})
MANY = 1024
"""Entries of a container up to which it is copied at every look; of a larger one only growth is
undone.
"""
SMALL = 65536
"""A copy of so many elements costs less than it is worth to think about."""
DEEPEST = 5
NOTHING: frozenset[str] = frozenset()
Seen = set[int]


class Kept(Protocol):
    """One value that can change in place. `seen` holds the ids of those already visited."""

    def refresh(self, seen: Seen) -> None: ...
    def moved(self, seen: Seen) -> bool: ...
    def restore(self, seen: Seen) -> None: ...


class Reach:
    """How far to look: at a module's own values on every step, or at everything an optimizer may
    touch, once.
    """

    def __init__(self, *, everything: bool = False, room: int = 2**24) -> None:
        self.everything = everything
        self._room = room
        self._kept: dict[int, object] = {}

    def has(self, value: object) -> bool:
        """Where everything is taken once, what two places share is taken once. Held, so that no id
        comes again.
        """
        if not self.everything:
            return False
        known = id(value) in self._kept
        self._kept[id(value)] = value
        return known

    def takes(self, tensor: Tensor) -> bool:
        """Is its content copied?"""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        if (
            tensor.is_inference()
            or tensor.is_meta
            or (not tensor.is_contiguous() and is_expanded(tensor))
        ):
            return False
        if self.everything:
            return True
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            # a parameter is the optimizer's, and what has a history is made anew by every forward
            # pass
            return False
        if tensor.numel() > self._room:
            return False
        self._room -= tensor.numel() if tensor.numel() > SMALL else 0
        return True

    def follows(self, value: object) -> bool:
        """Is it an object whose attributes are looked at?"""
        if isinstance(value, Optimizer):
            return self.everything
        if (
            isinstance(value, type | nn.Module)
            or callable(value)
            or type(value).__module__.startswith("torch.")
        ):
            return False
        if type(getattr(value, "__dict__", None)) is not dict:
            return False
        return self.everything or _only_data(value, 0)


def keep(value: Any, reach: Reach, depth: int = 0) -> Kept | None:
    """The memory of one value; None for what cannot change in place, or is none of ours."""
    if depth > DEEPEST or reach.has(value):
        return None
    if isinstance(value, Tensor):
        return KeptTensor(value, reach.everything) if reach.takes(value) else None
    if isinstance(value, ATOMS):
        return None
    if isinstance(value, dict):
        return _grown(value, reach) or KeptMapping(value, reach, depth)
    if isinstance(value, list | deque):
        return _grown(value, reach) or KeptSequence(value, reach, depth)
    if isinstance(value, tuple):
        return KeptTuple(value, reach, depth) if len(value) <= MANY or reach.everything else None
    if isinstance(value, set):
        return KeptSet(value) if len(value) <= MANY or reach.everything else None
    if is_array(value):
        fits = value.dtype.kind in "biufc" and (reach.everything or value.size <= SMALL)
        return KeptArray(value) if fits else None
    if reach.follows(value):
        return KeptMapping(vars(value), reach, depth, attributes=True)
    return None


def _grown(value: Any, reach: Reach) -> Kept | None:
    too_many = len(value) > MANY and not reach.everything
    return KeptLength(value) if too_many else None


class KeptMapping:
    """A dict, or the attributes of an object. Values are held by reference, what can change inside
    them is kept too.
    """

    def __init__(
        self,
        live: dict[Any, Any],
        reach: Reach,
        depth: int,
        *,
        attributes: bool = False,
        skip: frozenset[str] = NOTHING,
    ) -> None:
        self._live, self._reach, self._depth = live, reach, depth
        self._attributes, self._skip = attributes, skip
        self._take()

    def _take(self) -> None:
        self._items = dict(self._live)
        inner = [value for key, value in self._items.items() if key not in self._skip]
        self._children = _children(inner, self._reach, self._depth)
        for key, value in self._items.items():
            if has_history(value):
                self._items[key] = Shadow(value)

    def _same(self) -> bool:
        live, items = self._live, self._items
        return (
            len(live) == len(items)
            and all(map(is_, live.values(), items.values()))
            and all(map(is_, live, items))
        )

    def refresh(self, seen: Seen) -> None:
        if not _first(self._live, seen):
            return
        if self._same():
            for child in self._children:
                child.refresh(seen)
        else:
            self._take()

    def moved(self, seen: Seen) -> bool:
        if not _first(self._live, seen):
            return False
        return not self._same() or any(child.moved(seen) for child in self._children)

    def restore(self, seen: Seen) -> None:
        if not _first(self._live, seen):
            return
        for child in self._children:
            child.restore(seen)
        if self._same():
            return
        before = {key: real(value, self._live.get(key)) for key, value in self._items.items()}
        if not self._attributes:
            self._live.clear()
            self._live.update(before)
            return
        for key, value in before.items():
            now = self._live.get(key)
            if key not in self._skip and now is not value and plain(value) and not callable(now):
                self._live[key] = value
        for key in [key for key, value in self._live.items() if key not in before and plain(value)]:
            del self._live[key]


class KeptSequence:
    """A list or a deque."""

    def __init__(self, live: list[Any] | deque[Any], reach: Reach, depth: int) -> None:
        self._live, self._reach, self._depth = live, reach, depth
        self._take()

    def _take(self) -> None:
        self._items: list[Any] = list(self._live)
        self._children = _children(self._items, self._reach, self._depth)
        self._items = [Shadow(value) if has_history(value) else value for value in self._items]

    def _same(self) -> bool:
        return len(self._live) == len(self._items) and all(map(is_, self._live, self._items))

    def refresh(self, seen: Seen) -> None:
        if not _first(self._live, seen):
            return
        if self._same():
            for child in self._children:
                child.refresh(seen)
        else:
            self._take()

    def moved(self, seen: Seen) -> bool:
        if not _first(self._live, seen):
            return False
        return not self._same() or any(child.moved(seen) for child in self._children)

    def restore(self, seen: Seen) -> None:
        if not _first(self._live, seen):
            return
        for child in self._children:
            child.restore(seen)
        if not self._same():
            before = [real(value, None) for value in self._items]
            self._live.clear()
            self._live.extend(before)


class KeptTuple:
    """It cannot change itself; what is in it can."""

    def __init__(self, live: tuple[Any, ...], reach: Reach, depth: int) -> None:
        self._live = live
        self._children = _children(live, reach, depth)

    def refresh(self, seen: Seen) -> None:
        for child in self._children:
            child.refresh(seen)

    def moved(self, seen: Seen) -> bool:
        return any(child.moved(seen) for child in self._children)

    def restore(self, seen: Seen) -> None:
        for child in self._children:
            child.restore(seen)


class KeptSet:
    def __init__(self, live: set[Any]) -> None:
        self._live, self._items = live, set(live)

    def refresh(self, seen: Seen) -> None:
        self._items = set(self._live)

    def moved(self, seen: Seen) -> bool:
        return self._live != self._items

    def restore(self, seen: Seen) -> None:
        if self._live != self._items:
            self._live.clear()
            self._live.update(self._items)


class KeptLength:
    """A container too large to be copied at every step: what was added at its end is taken off
    again.
    """

    def __init__(self, live: Any) -> None:
        self._live, self._count = live, len(live)

    def refresh(self, seen: Seen) -> None:
        self._count = len(self._live)

    def moved(self, seen: Seen) -> bool:
        return len(self._live) != self._count

    def restore(self, seen: Seen) -> None:
        while len(self._live) > self._count:
            if isinstance(self._live, dict):
                self._live.popitem()
            else:
                self._live.pop()


class KeptArray:
    """A numpy array: nothing tells whether it was written to, so it is copied at every look."""

    def __init__(self, live: Any) -> None:
        self._live, self._saved = live, live.copy()

    def refresh(self, seen: Seen) -> None:
        self._saved[...] = self._live

    def moved(self, seen: Seen) -> bool:
        return bool(self._live.tobytes() != self._saved.tobytes())

    def restore(self, seen: Seen) -> None:
        if self._live.flags.writeable:
            self._live[...] = self._saved


class KeptTensor:
    """Copied again only when its version counter moved, and compared by it, unless it has to be
    `exact`.
    """

    def __init__(self, live: Tensor, exact: bool) -> None:
        self._live, self._exact = live, exact
        self._saved = _copy(live)
        self._version = live._version

    def refresh(self, seen: Seen) -> None:
        if self._live._version == self._version:
            return
        self._version = self._live._version
        self._saved = _copy(self._live)

    def moved(self, seen: Seen) -> bool:
        return (
            not _equal(self._live, self._saved)
            if self._exact
            else self._live._version != self._version
        )

    @torch.no_grad()
    def restore(self, seen: Seen) -> None:
        if not _first(self._live, seen) or not self.moved(seen):
            return
        if self._live.shape != self._saved.shape:
            self._live.data = self._saved.to(self._live.device, copy=True)
        else:
            self._live.detach().copy_(self._saved)
        self._version = self._live._version


class Shadow:
    """A tensor with a history: to hold it would keep a graph alive, so its values are held without."""

    def __init__(self, value: Tensor) -> None:
        self._ref = weakref.ref(value)
        self._values = value.detach() if value.numel() <= SMALL else None

    def real(self, otherwise: Any) -> Any:
        alive = self._ref()
        if alive is not None:
            return alive
        return self._values if self._values is not None else otherwise


def has_history(value: object) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def real(value: Any, otherwise: Any) -> Any:
    """The value itself, where only a shadow of it was held; `otherwise` where it is gone."""
    return value.real(otherwise) if isinstance(value, Shadow) else value


def _children(values: Iterable[Any], reach: Reach, depth: int) -> list[Kept]:
    found = (keep(value, reach, depth + 1) for value in values if type(value) not in UNCHANGING)
    return [child for child in found if child is not None]


def plain(value: object) -> bool:
    """Is it data, as opposed to something that does things?"""
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor)) or is_array(value):
        return True
    return (
        not callable(value)
        and type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, nn.Module)
    )


def _only_data(value: Any, depth: int) -> bool:
    """A helper object, all the way down: a trainer or a logger that hangs on a module does more
    than hold values.
    """
    if isinstance(value, (*ATOMS, Tensor)) or is_array(value):
        return True
    if depth > DEEPEST or isinstance(value, nn.Module | type) or callable(value):
        return False
    if isinstance(value, CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= MANY and all(_only_data(item, depth + 1) for item in items)
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or type(value).__module__.startswith("torch."):
        return False
    return all(_only_data(item, depth + 1) for item in own.values())


def _first(live: object, seen: Seen) -> bool:
    """Shared values are visited once, and circles end."""
    if id(live) in seen:
        return False
    seen.add(id(live))
    return True


def is_array(value: object) -> bool:
    """A numpy array, without importing numpy for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _copy(live: Tensor) -> Tensor:
    try:
        return live.detach().clone()
    except torch.OutOfMemoryError:  # the device is full: main memory may not be
        return live.detach().to("cpu", copy=True)


def _equal(live: Tensor, saved: Tensor) -> bool:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return live.shape == saved.shape and torch.equal(live.detach(), saved.to(live.device))
    return False
