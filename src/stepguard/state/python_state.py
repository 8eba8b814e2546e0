"""Remember what a value was at one moment: numbers, tensors, arrays, containers, plain objects.

Each kind of value has a class that can remember again (`refresh`), tell whether the value has moved
since, and put it back (`restore`), in the very objects that were there. Values that are not data
(functions, modules, files, locks) are left alone, and so is an object that holds any of those.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import compress
from operator import is_, is_not
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.state.files import (
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
from stepguard.tensors.names import is_distributed
from stepguard.tensors.values import PLAIN, is_expanded, local_part

# --- Remember what a value was at one moment: numbers, tensors, arrays, containers, plain
# objects.


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


# --- Attributes of the user's own modules: counters, running tensors, lists, hidden states.


LARGEST_HELD = 2**22
"""Elements of a tensor that is held until the next step, though the model has dropped it."""
INTERNAL = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: parameters, buffers, submodules, hooks, the training flag.
"""


class AttributeKeeper:
    """Remembers the attributes of some modules at one moment and can go back to it.

    All attributes of all modules are one flat list, so that a step in which none moved is a few
    passes in C.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._owns: list[dict[str, Any]] = []
        self._count = -1
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._inside: dict[int, KeptValue] = {}
        """By position in `_values`: the memory of a value that can change in place."""
        self._scope = Scope()

    def remember(self, modules: list[nn.Module]) -> None:
        """Take the present values of these modules, and of no others."""
        now = None
        if len(modules) == len(self._modules) and all(map(is_, modules, self._modules)):
            now = self._now()
        if now is None:
            self._start_over(modules)
            return
        for index in compress(range(len(now)), map(is_not, now, self._values)):
            self._take(index, now[index], replaced=True)
        seen: set[int] = set()
        for kept in self._inside.values():
            kept.refresh(seen)

    def moved(self) -> bool:
        """Has any of them changed since?"""
        now = self._now()
        if now is None or not all(map(_is_unchanged, self._values, now)):
            return True
        seen: set[int] = set()
        return any(kept.moved(seen) for kept in self._inside.values())

    def restore(self) -> None:
        """Go back to what `remember` took. What is not data (a function, a module) stays."""
        seen: set[int] = set()
        for kept in self._inside.values():
            kept.restore(seen)
        for (own, key), value in zip(self._places, self._values, strict=True):
            present = own.get(key)
            before = original(value, present)
            if before is not present and is_data(before) and not callable(present):
                own[key] = before
        if self._attributes() != self._count:
            self._remove_added()

    def _attributes(self) -> int:
        return sum(map(len, self._owns))

    def _now(self) -> list[Any] | None:
        """Return the present values in the same order; None if attributes have come or gone."""
        if self._attributes() != self._count:
            return None
        try:
            return [own[key] for own, key in self._places]
        except KeyError:
            return None

    def _start_over(self, modules: list[nn.Module]) -> None:
        self._modules = list(modules)
        self._scope = Scope()
        self._inside = {}
        # A layer of torch keeps all it remembers in parameters and buffers.
        self._owns = [vars(module) for module in modules if not is_torchs(module)]
        self._count = self._attributes()
        self._places = [(own, key) for own in self._owns for key in own if key not in INTERNAL]
        self._values = [None] * len(self._places)
        for index, (own, key) in enumerate(self._places):
            self._take(index, own[key])

    def _take(self, index: int, value: Any, *, replaced: bool = False) -> None:
        """`replaced`: the attribute gets a new object in every step. A large tensor is then held,
        not copied.
        """
        large = replaced and isinstance(value, Tensor) and value.numel() > SMALL
        too_large = large and value.numel() > LARGEST_HELD
        self._values[index] = value
        if has_graph(value) or too_large:
            self._values[index] = WithoutGraph(value)
        kept = None if large else keep(value, self._scope)
        if kept is None:
            self._inside.pop(index, None)
        else:
            self._inside[index] = kept

    def _remove_added(self) -> None:
        known = {(id(own), key) for own, key in self._places}
        for own in self._owns:
            for key in list(own):
                added = key not in INTERNAL and (id(own), key) not in known
                if added and is_data(own[key]):
                    del own[key]


def _is_unchanged(before: Any, now: Any) -> bool:
    """A number that was written again with the same value has not changed."""
    if before is now or original(before, None) is now:
        return True
    if type(before) not in (int, float, bool) or type(now) is not type(before):
        return False
    return bool(before == now)


# --- Plain numbers that modules count with, kept with snapshots and checkpoints.


Number = int | float


class ModuleCounters:
    """Integers and floats of the user's own modules, by `ROOT/module:attribute`."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._first = self._present()
        self._moving: set[str] = set()

    def moved(self) -> dict[str, Number]:
        """Return the present value of every number that has moved since the guard was built."""
        present = self._present()
        for place, value in present.items():
            if self._first.get(place, value) != value:
                self._moving.add(place)
        return {place: value for place, value in present.items() if place in self._moving}

    def put_back(
        self, numbers: Mapping[str, Number], left: Mapping[str, Container[str]] | None = None
    ) -> None:
        """Put back the numbers that had moved by then; the others go back to their first value.

        `left`: paths of modules below each root that are left alone.
        """
        for place, attributes, key in self._places(left or {}):
            first = self._first.get(place, attributes[key])
            value = numbers.get(place, first)
            if attributes[key] != value:
                attributes[key] = value

    def _present(self) -> dict[str, Number]:
        return {place: attributes[key] for place, attributes, key in self._places({})}

    def _places(
        self, left: Mapping[str, Container[str]]
    ) -> Iterator[tuple[str, dict[str, Any], str]]:
        for prefix, root in self._roots.items():
            skipped = left.get(prefix, ())
            for path, module in root.named_modules():
                if path in skipped or is_torchs(module):
                    continue
                attributes = vars(module)
                for key, value in attributes.items():
                    # type() and not isinstance: bool is an int, and a flag is not a counter.
                    if type(value) in (int, float):
                        yield f"{prefix}{path}:{key}", attributes, key
