"""What a loss function keeps for itself: generators, counters, lists, tensors that neither batch
nor modules hold.

A replay cannot put back what was never remembered, so a loss function with such state may give
another answer the second time. Looked at only once a step is bad: which of it moves when the step
runs again, and back it goes afterwards. State of modules is not looked at: it is remembered before
the step.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepguard.locate.source import is_users

MOST_PLACES = 2000
"""Values that are looked at; a data set in a closure must not take minutes."""
DEEPEST = 4

SMALL = 1_000_000
"""Elements of a tensor up to which it is copied."""
LONG = 100_000
"""Entries of a list from which on only their number is compared."""


class Place(Protocol):
    """Where a value stands: it can be asked for again, and replaced."""

    def read(self) -> object: ...
    def write(self, value: Any) -> None: ...


@dataclass(slots=True)
class Kept:
    """One value with state of its own: what it was, how to ask again, and how to put it back."""

    name: str
    kind: str
    """What it is, in words."""
    token: object
    read: Callable[[], object]
    restore: Callable[[], object]

    @property
    def moved(self) -> bool:
        now = self.read()
        return now != self.token and (
            now == now or self.token == self.token
        )  # a NaN is not another NaN

    @property
    def words(self) -> str:
        return f"{self.kind} `{self.name}`"


class OwnState:
    """Everything a function can reach by its closure, defaults, bound object and the globals it
    names.
    """

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._kept: list[Kept] = []
        self._function(function, 0)

    def moved(self) -> tuple[str, ...]:
        """What is no longer as it was, in words."""
        return tuple(dict.fromkeys(kept.words for kept in self._kept if kept.moved))

    def restore(self) -> None:
        """Back to what was found. Not while other threads run: what moved may be theirs, a
        prefetched batch for one.
        """
        if _others_at_work():
            return
        for kept in self._kept:
            if kept.moved:
                kept.restore()

    # --- the walk
    # ------------------------------------------------------------------------------------------------

    def _look(self, name: str, value: Any, place: Place | None, depth: int) -> None:
        if depth > DEEPEST or len(self._kept) >= MOST_PLACES:
            return
        if type(value) in (int, float):
            self._number(name, value, place)
            return
        if id(value) in self._seen or isinstance(value, nn.Module | nn.Parameter | type):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._tensor(name, value, place)
        elif not (self._generator(name, value) or self._container(name, value, depth)):
            self._anything(name, value, depth)

    def _number(self, name: str, value: float, place: Place | None) -> None:
        if place is not None:
            self._kept.append(
                Kept(name, "the number", value, place.read, functools.partial(place.write, value))
            )

    def _tensor(self, name: str, value: Tensor, place: Place | None) -> None:
        if place is not None and value.numel() <= SMALL and not value.is_inference():
            self._kept.append(_tensor(name, value, place))

    def _generator(self, name: str, value: Any) -> bool:
        for recognise in (_torch_generator, _python_generator, _numpy_generator, _counter):
            kept = recognise(name, value)
            if kept is not None:
                self._kept.append(kept)
                return True
        return False

    def _container(self, name: str, value: Any, depth: int) -> bool:
        if isinstance(value, dict):
            for key, item in list(value.items()):
                self._look(f"{name}[{key!r}]", item, _Item(value, key), depth + 1)
            return True
        if isinstance(value, list | deque):
            self._kept.append(_list(name, value))
            for position, item in enumerate(itertools.islice(value, MOST_PLACES)):
                self._look(f"{name}[{position}]", item, _Item(value, position), depth + 1)
            return True
        return isinstance(value, tuple | set | frozenset | str | bytes)

    def _anything(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, functools.partial | FunctionType | MethodType):
            self._function(value, depth + 1)
        elif _users_object(value):
            for key, item in list(vars(value).items()):
                self._look(f"{name}.{key}", item, _Attribute(value, key), depth + 1)

    def _function(self, function: Any, depth: int) -> None:
        while isinstance(function, functools.partial):
            for key, item in function.keywords.items():
                self._look(key, item, None, depth)
            for position, item in enumerate(function.args):
                self._look(f"argument {position}", item, None, depth)
            function = function.func
        if isinstance(function, MethodType):
            self._look("self", function.__self__, None, depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            self._look(type(function).__name__, function, None, depth)
            return
        for name, value, place in _reached(function):
            self._look(name, value, place, depth)


def _reached(function: FunctionType) -> Iterator[tuple[str, Any, Place | None]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents, _Cell(cell)
        except ValueError:  # not assigned yet
            continue
    for position, value in enumerate(function.__defaults__ or ()):
        yield f"default {position}", value, None
    if is_users(code.co_filename):
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name], _Item(function.__globals__, name)


def _users_object(value: Any) -> bool:
    """An instance of a class of the user's own program, not of a library."""
    if not hasattr(value, "__dict__") or isinstance(value, ModuleType):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return file is not None and is_users(file) and "site-packages" not in file


def _others_at_work() -> bool:
    """Is there a thread besides this one, stepguard's own and a progress bar's clock?"""
    harmless = ("stepguard", "TMonitor", "tqdm")
    others = (
        thread for thread in threading.enumerate() if thread is not threading.current_thread()
    )
    return any(
        not (thread.name.startswith(harmless) or type(thread).__name__ in harmless)
        for thread in others
    )


# --- how a value is read again and put back
# ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    owner: Any
    key: Any

    def read(self) -> object:
        try:
            return self.owner[self.key]
        except (KeyError, IndexError):
            return None

    def write(self, value: Any) -> None:
        self.owner[self.key] = value


@dataclass(slots=True)
class _Attribute:
    owner: Any
    key: str

    def read(self) -> object:
        return getattr(self.owner, self.key, None)

    def write(self, value: Any) -> None:
        setattr(self.owner, self.key, value)


@dataclass(slots=True)
class _Cell:
    cell: CellType

    def read(self) -> object:
        return self.cell.cell_contents

    def write(self, value: Any) -> None:
        self.cell.cell_contents = value


def _tensor(name: str, value: Tensor, place: Place) -> Kept:
    copy, version = value.detach().clone(), value._version

    def token() -> object:
        now = place.read()
        return (id(now), now._version) if isinstance(now, Tensor) else id(now)

    def put_back() -> None:
        if value._version != version:
            with torch.no_grad():
                value.copy_(copy)
        place.write(value)

    return Kept(name, "the tensor", token(), token, put_back)


def _torch_generator(name: str, value: Any) -> Kept | None:
    if not isinstance(value, torch.Generator):
        return None
    state = value.get_state()

    def token() -> object:
        return bytes(value.get_state().tolist())

    return Kept(name, "the generator", token(), token, functools.partial(value.set_state, state))


def _python_generator(name: str, value: Any) -> Kept | None:
    if not isinstance(value, random.Random):
        return None
    state = value.getstate()
    return Kept(
        name, "the generator", state, value.getstate, functools.partial(value.setstate, state)
    )


def _numpy_generator(name: str, value: Any) -> Kept | None:
    """numpy's generators, known by their looks: this package does not need numpy."""
    if not type(value).__module__.startswith("numpy.random"):
        return None
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    if bits is None:
        return None
    state = bits.state

    def put_back() -> None:
        bits.state = state

    return Kept(name, "the generator", repr(state), lambda: repr(bits.state), put_back)


def _counter(name: str, value: Any) -> Kept | None:
    if not isinstance(value, itertools.count):
        return None
    return Kept(name, "the counter", repr(value), lambda: repr(value), lambda: None)


def _list(name: str, value: list[Any] | deque[Any]) -> Kept:
    items = list(value)

    def token() -> object:
        return len(value) if len(value) > LONG else [id(item) for item in value]

    def put_back() -> None:
        same_so_far = all(one is other for one, other in zip(value, items, strict=False))
        if isinstance(value, list) and len(value) > len(items) and same_so_far:
            del value[len(items) :]

    return Kept(name, "the list", token(), token, put_back)
