"""One memory of Python state: numbers, tensors, arrays, containers, generators, plain objects.

`keep` remembers what a value is at one moment. What it returns can remember again (`refresh`), say
whether the value has changed since (`moved`), and put it back (`restore`), in the very objects that
were there. A `Scope` says what is worth a copy: the attributes of modules in every step, the memory
of communication hooks, or all that an update may touch. Values that are not data (functions,
modules, files, locks) are left alone, and so is an object of a module that holds any of those.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from itertools import compress
from operator import is_, is_not
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.tensors.names import is_distributed
from stepguard.tensors.values import PLAIN, is_expanded, local_part

CONTAINERS = (dict, list, tuple, set, deque)
ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
UNCHANGING = frozenset({*ATOMS, bool})
MANY = 1024
"""Entries of a container up to which it is copied in every step; of a larger one only growth is
undone.
"""
SMALL = 65536
"""Elements of a tensor up to which a copy costs less than finding out whether it is needed."""
DEEPEST = 5
INTERNAL = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: parameters, buffers, submodules, hooks, the training flag.
"""

# --- Data, and objects that do something


def is_array(value: object) -> bool:
    """True for a numpy array. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_data(value: object) -> bool:
    """True for numbers, tensors, arrays, containers and objects that are not callable."""
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor)) or is_array(value):
        return True
    return not callable(value) and not isinstance(value, nn.Module) and has_attributes(value)


def has_attributes(value: object) -> bool:
    """True for an object with an ordinary attribute dictionary."""
    return type(getattr(value, "__dict__", None)) is dict


def holds_only_data(value: Any, depth: int = 0) -> bool:
    """True for a helper object that is data all the way down, unlike a trainer or a logger."""
    if isinstance(value, (*ATOMS, Tensor)) or is_array(value):
        return True
    if depth > DEEPEST or isinstance(value, nn.Module | type) or callable(value):
        return False
    if isinstance(value, CONTAINERS):
        if len(value) > MANY:
            return False
        inside = list(value.values() if isinstance(value, dict) else value)
    elif has_attributes(value) and not is_torchs(value):
        inside = list(vars(value).values())
    else:
        return False
    return all(holds_only_data(item, depth + 1) for item in inside)


def is_torchs(value: object) -> bool:
    """True for an object of a class that torch defines, and derives from no one else's.

    FSDP2 puts a class of its own in the place of the user's, derived from both.
    """
    kind = type(value)
    if not kind.__module__.startswith("torch."):
        return False
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return packages - {"torch"} <= sys.stdlib_module_names


class WithoutGraph:
    """Stands for a tensor with a graph: holding the tensor would keep the graph in memory."""

    def __init__(self, value: Tensor) -> None:
        self._ref = weakref.ref(value)
        self._values = value.detach() if value.numel() <= SMALL else None

    def original(self, otherwise: Any) -> Any:
        """Return the tensor, its values if it is gone, or `otherwise` if those were not held."""
        alive = self._ref()
        if alive is not None:
            return alive
        if self._values is None:
            return otherwise
        return self._values


def has_graph(value: object) -> bool:
    """True for a tensor that an operation with gradients made."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def original(value: Any, otherwise: Any) -> Any:
    """Return the value that was held, also if `WithoutGraph` stands for it."""
    if isinstance(value, WithoutGraph):
        return value.original(otherwise)
    return value


# --- Values that can change in place


Seen = set[int]
"""Ids of the values already visited: shared values are visited once, and circles end."""


class Scope:
    """What is remembered of modules in every step, of hooks in every step, of an update once."""

    def __init__(self, of: Literal["modules", "hooks", "update"] = "modules") -> None:
        self.of = of
        self._room = 2**24
        self._kept: dict[int, object] = {}

    def knows(self, value: object) -> bool:
        """True if this value is already part of what an update may touch."""
        if self.of != "update":
            return False
        known = id(value) in self._kept
        # Held, so that no other object gets its id.
        self._kept[id(value)] = value
        return known

    def copies(self, tensor: Tensor) -> bool:
        """Is the content of this tensor copied?"""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return False
        if tensor.is_inference() or tensor.is_meta:
            return False
        if not tensor.is_contiguous() and is_expanded(tensor):
            return False
        if self.of != "modules":
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

    def follows(self, value: object) -> bool:
        """Are the attributes of this object remembered?"""
        if self.of == "hooks":
            return False
        if isinstance(value, Optimizer):
            return self.of == "update"
        if isinstance(value, type | nn.Module) or callable(value) or is_torchs(value):
            return False
        return has_attributes(value) and (self.of == "update" or holds_only_data(value))


def keep(value: Any, scope: Scope, depth: int = 0, earlier: Any = None) -> Kept | None:
    """Remember one value; None for what cannot change in place or is left alone.

    `earlier`: what was kept of the value that was in the same place before.
    """
    if depth > DEEPEST or scope.knows(value):
        return None
    if isinstance(value, Tensor):
        return _keep_tensor(value, scope, earlier)
    if isinstance(value, ATOMS):
        return None
    if isinstance(value, CONTAINERS):
        return _keep_container(value, scope, depth)
    if is_array(value):
        too_large = scope.of == "modules" and value.size > SMALL
        if value.dtype.kind not in "biufc" or too_large:
            return None
        # Bytes, not ==: NaN differs from itself. There is no version counter.
        return KeptLeaf(value, lambda array: array.tobytes(), _refill_array)
    if scope.of == "hooks":
        return keep_generator(value)
    if scope.follows(value):
        return KeptContainer(vars(value), scope, depth, attributes=True)
    return None


def _keep_tensor(value: Tensor, scope: Scope, earlier: Any) -> Kept | None:
    if is_distributed(value):
        # What this rank holds of it, in the same memory: the rest is kept where it is.
        value = local_part(value.detach())
    if not scope.copies(value):
        return None
    # A tensor in the place of one that was never written to: it will not be, either.
    held = scope.of == "hooks" and isinstance(earlier, KeptTensor)
    held = held and earlier.live is not value and not earlier.moved(set())
    return KeptTensor(value, exact=scope.of == "update", held=held)


def _keep_container(value: Any, scope: Scope, depth: int) -> Kept | None:
    if scope.of == "modules" and len(value) > MANY:
        # Too large to be copied in every step: entries added at its end are removed.
        ends = isinstance(value, dict | list | deque)
        if ends:
            return KeptLeaf(value, len, _shorten)
        return None
    if isinstance(value, set):
        return KeptLeaf(value, set, _refill_set)
    return KeptContainer(value, scope, depth)


class KeptLeaf:
    """A set, an array, a generator, or the length of a large container: `save` describes it."""

    def __init__(
        self, live: Any, save: Callable[[Any], Any], put_back: Callable[[Any, Any], object]
    ) -> None:
        self.live = live
        self._save = save
        self._put_back = put_back
        self.refresh(set())

    def refresh(self, seen: Seen) -> None:
        """Remember the present value instead."""
        self._saved = self._save(self.live)

    def moved(self, seen: Seen) -> bool:
        """Has the value changed since?"""
        return bool(self._save(self.live) != self._saved)

    def restore(self, seen: Seen) -> list[str]:
        """Put the value back; return the names of what is lost."""
        if self.moved(seen):
            self._put_back(self.live, self._saved)
        return []


def _shorten(live: Any, count: int) -> None:
    take_off = live.popitem if isinstance(live, dict) else live.pop
    while len(live) > count:
        take_off()


def _refill_set(live: set[Any], items: set[Any]) -> None:
    live.clear()
    live.update(items)


def _refill_array(live: Any, content: bytes) -> None:
    if live.flags.writeable:
        live[...] = sys.modules["numpy"].frombuffer(content, live.dtype).reshape(live.shape)


def keep_generator(value: Any) -> KeptLeaf | None:
    """Remember a random number generator or a counter; None for anything else."""
    if isinstance(value, torch.Generator):
        return KeptLeaf(
            value,
            lambda generator: generator.get_state().tolist(),
            lambda generator, state: generator.set_state(torch.tensor(state, dtype=torch.uint8)),
        )
    if isinstance(value, random.Random):
        return KeptLeaf(value, random.Random.getstate, random.Random.setstate)
    if isinstance(value, itertools.count):
        # Its position can be read and not be set.
        return KeptLeaf(value, repr, lambda counter, position: None)
    # By name: this package does not depend on numpy. RandomState hides its bit generator.
    if not type(value).__module__.startswith("numpy.random"):
        return None
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    if bits is None:
        return None
    return KeptLeaf(
        bits,
        lambda now: _ByRepr(now.state),
        lambda now, saved: setattr(now, "state", saved.state),
    )


class _ByRepr:
    """The state of a bit generator of numpy: a dict with arrays, which == cannot compare."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByRepr) and repr(self.state) == repr(other.state)


class KeptTensor:
    """A tensor, copied again only when its version counter moved.

    `exact`: compared by its values, since the counter does not see writes through `.data`.
    `held`: it is not copied before it is written to for the first time.
    """

    def __init__(self, live: Tensor, *, exact: bool = False, held: bool = False) -> None:
        self.live = live
        self.saved = None if held else _copy(live)
        self._exact = exact
        self._version = live._version

    def refresh(self, seen: Seen) -> None:
        """Remember the present value instead."""
        if self.live._version != self._version:
            self._version = self.live._version
            self.saved = _copy(self.live)

    def moved(self, seen: Seen) -> bool:
        """Has it been written to since?"""
        live = self.live
        saved = self.saved
        if not self._exact or saved is None:
            return live._version != self._version
        # Some dtypes have no torch.equal; then the tensor counts as moved and is put back.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            same = live.shape == saved.shape and torch.equal(live.detach(), saved.to(live.device))
            return not same
        return True

    @torch.no_grad()
    def restore(self, seen: Seen) -> list[str]:
        """Put the values back; a tensor that was only held and is written to becomes 0."""
        if not _first_visit(self.live, seen) or not self.moved(seen):
            return []
        lost: list[str] = []
        if self.saved is None:
            self.live.detach().zero_()
            lost.append("")
        elif self.live.shape != self.saved.shape:
            self.live.data = self.saved.to(self.live.device, copy=True)
        else:
            self.live.detach().copy_(self.saved)
        self._version = self.live._version
        return lost


class KeptContainer:
    """A dict, list, deque or tuple, or the attributes of an object.

    Entries are held by reference; what can change inside them is remembered, too.
    """

    def __init__(
        self,
        live: Any,
        scope: Scope,
        depth: int = 0,
        *,
        attributes: bool = False,
        skip: Container[str] = (),
    ) -> None:
        self.live = live
        self._scope = scope
        self._depth = depth
        self._attributes = attributes
        self._skip = skip
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._children: dict[Any, Kept] = {}
        self._take(set())

    def _take(self, seen: Seen) -> None:
        live = self.live
        pairs = list(live.items() if isinstance(live, Mapping) else enumerate(live))
        self._keys = []
        self._values = []
        before = self._children
        self._children = {}
        for key, value in pairs:
            self._keys.append(key)
            self._values.append(WithoutGraph(value) if has_graph(value) else value)
            if key in self._skip or type(value) in UNCHANGING:
                continue
            child = before.get(key)
            if child is not None and child.live is value:
                child.refresh(seen)
            else:
                child = keep(value, self._scope, self._depth + 1, child)
            if child is not None:
                self._children[key] = child

    def _same(self) -> bool:
        """Does the container hold the very objects it held?"""
        live = self.live
        if isinstance(live, tuple):
            return True
        if len(live) != len(self._values):
            return False
        # map and is_ run in C: this is asked of every container in every step.
        if not isinstance(live, Mapping):
            return all(map(is_, live, self._values))
        return all(map(is_, live.values(), self._values)) and all(map(is_, live, self._keys))

    def refresh(self, seen: Seen) -> None:
        """Remember the present entries instead."""
        if not _first_visit(self.live, seen):
            return
        if not self._same():
            self._take(seen)
            return
        for child in self._children.values():
            child.refresh(seen)

    def moved(self, seen: Seen) -> bool:
        """Has an entry, or a value inside one, changed since?"""
        if not _first_visit(self.live, seen):
            return False
        return not self._same() or any(child.moved(seen) for child in self._children.values())

    def restore(self, seen: Seen) -> list[str]:
        """Put entries and the values inside them back; return the names of what is lost."""
        lost: list[str] = []
        if not _first_visit(self.live, seen):
            return lost
        for key, child in self._children.items():
            for name in child.restore(seen):
                owner = getattr(self.live, "owner", self.live)
                lost.append(name or f"{type(owner).__name__} {key}")
        if self._same():
            return lost
        live: Any = self.live
        if not isinstance(live, MutableMapping):
            before = [original(value, None) for value in self._values]
            live.clear()
            live.extend(before)
            return lost
        entries: dict[Any, Any] = {}
        for key, value in zip(self._keys, self._values, strict=True):
            entries[key] = original(value, live.get(key))
        if self._attributes:
            put_back_attributes(live, entries, self._skip)
        else:
            live.clear()
            live.update(entries)
        return lost


Kept = KeptLeaf | KeptTensor | KeptContainer


def put_back_attributes(live: Any, before: dict[Any, Any], skip: Container[str]) -> None:
    """Put back data only: a method or a hook that was replaced since stays."""
    for key, value in before.items():
        now = live.get(key)
        if key not in skip and now is not value and is_data(value) and not callable(now):
            live[key] = value
    for key in list(live):
        if key not in before and key not in skip and is_data(live[key]):
            del live[key]


def _first_visit(live: object, seen: Seen) -> bool:
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


# --- Attributes of the user's own modules: counters, running tensors, lists, hidden states


class AttributeKeeper:
    """Remembers the attributes of some modules at one moment and can go back to it.

    All attributes of all modules are one flat list, so that a step in which none moved is a few
    passes in C.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self.owns: list[dict[str, Any]] = []
        """Attributes of modules that may remember something in them; empty: nothing to remember."""
        self._count = -1
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._inside: dict[int, Kept] = {}
        """By position in `_values`: the memory of a value that can change in place."""
        self._scope = Scope()

    def remember(self, modules: list[nn.Module]) -> None:
        """Take the present values of these modules, and of no others."""
        now = None
        if len(modules) == len(self._modules) and all(map(is_, modules, self._modules)):
            now = self._now()
        if now is not None:
            for index in compress(range(len(now)), map(is_not, now, self._values)):
                self._take(index, now[index], replaced=True)
            seen: Seen = set()
            for kept in self._inside.values():
                kept.refresh(seen)
            return
        self._modules = modules
        self._scope = Scope()
        self._inside = {}
        # A layer of torch keeps all it remembers in parameters and buffers.
        self.owns = [vars(module) for module in modules if not is_torchs(module)]
        self._count = sum(map(len, self.owns))
        self._places = [(own, key) for own in self.owns for key in own if key not in INTERNAL]
        self._values = [None] * len(self._places)
        for index, (own, key) in enumerate(self._places):
            self._take(index, own[key])

    def moved(self) -> bool:
        """Has any of them changed since?"""
        now = self._now()
        if now is None or not all(map(_is_unchanged, self._values, now)):
            return True
        seen: Seen = set()
        return any(kept.moved(seen) for kept in self._inside.values())

    def restore(self) -> None:
        """Go back to what `remember` took. What is not data (a function, a module) stays."""
        seen: Seen = set()
        for kept in self._inside.values():
            kept.restore(seen)
        before: dict[int, dict[str, Any]] = {id(own): {} for own in self.owns}
        for (own, key), value in zip(self._places, self._values, strict=True):
            before[id(own)][key] = original(value, own.get(key))
        for own in self.owns:
            put_back_attributes(own, before[id(own)], INTERNAL)

    def _now(self) -> list[Any] | None:
        """Return the present values in the same order; None if attributes have come or gone."""
        if sum(map(len, self.owns)) != self._count:
            return None
        try:
            return [own[key] for own, key in self._places]
        except KeyError:
            return None

    def _take(self, index: int, value: Any, *, replaced: bool = False) -> None:
        """`replaced`: the attribute gets a new object in every step. A large tensor is then held,
        not copied.
        """
        size = 0
        if replaced and isinstance(value, Tensor):
            size = value.numel()
        self._values[index] = value
        # Elements of a tensor that is held until the next step, though the model has dropped it
        if has_graph(value) or size > 2**22:
            self._values[index] = WithoutGraph(value)
        kept = None
        if not (size > SMALL):
            kept = keep(value, self._scope)
        self._inside.pop(index, None)
        if kept is not None:
            self._inside[index] = kept


def _is_unchanged(before: Any, now: Any) -> bool:
    """A number that was written again with the same value has not changed."""
    if before is now or original(before, None) is now:
        return True
    if type(before) not in (int, float, bool) or type(now) is not type(before):
        return False
    return bool(before == now)


# --- Plain numbers that modules count with, kept with snapshots and checkpoints


Number = int | float


class ModuleCounters:
    """Integers and floats of the user's own modules, by `ROOT/module:attribute`."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._moving: set[str] = set()
        self._first = self._present()

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
        for place, own, key in self._places(left or {}):
            value = numbers.get(place, self._first.get(place, own[key]))
            if own[key] != value:
                own[key] = value

    def _present(self) -> dict[str, Number]:
        return {place: own[key] for place, own, key in self._places({})}

    def _places(
        self, left: Mapping[str, Container[str]]
    ) -> Iterator[tuple[str, dict[str, Any], str]]:
        for prefix, root in self._roots.items():
            for path, module in root.named_modules():
                if path in left.get(prefix, ()) or is_torchs(module):
                    continue
                for key, value in vars(module).items():
                    # type() and not isinstance: bool is an int, and a flag is not a counter.
                    if type(value) in (int, float):
                        yield f"{prefix}{path}:{key}", vars(module), key
