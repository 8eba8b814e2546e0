"""State of a loss function's own: generators, counters, lists, tensors outside batch and modules.

A replay cannot put back what was never remembered, so a loss function with such state may give
another answer the second time. Its state is collected only once a step is bad: what changes when
the step runs again is named, and put back afterwards. State of modules is not collected here: it is
remembered before the step.
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

MOST_VALUES = 2000
"""Values that are collected; a data set in a closure must not take minutes."""
DEEPEST = 4
SMALL = 1_000_000
"""Elements of a tensor up to which it is copied."""
LONG = 100_000
"""Entries of a list above which only their number is compared."""
HARMLESS_THREADS = ("stepguard", "TMonitor", "tqdm")
"""Threads that change no state of the user's: stepguard's own and a progress bar's clock."""


class Variable(Protocol):
    """A variable, attribute or item: its value can be read again, and replaced."""

    def read(self) -> object: ...
    def write(self, value: Any) -> None: ...


@dataclass(slots=True)
class Remembered:
    """One value as it was found, how to compare it and how to put it back."""

    name: str
    kind: str
    """What it is, in words."""
    fingerprint: object
    read: Callable[[], object]
    """Take the fingerprint again."""
    restore: Callable[[], object]

    @property
    def changed(self) -> bool:
        now = self.read()
        if now == self.fingerprint:
            return False
        # A NaN differs from itself, but NaN before and after is not a change.
        both_nan = now != now and self.fingerprint != self.fingerprint
        return not both_nan

    @property
    def words(self) -> str:
        return f"{self.kind} `{self.name}`"


class LossFunctionState:
    """Everything a function reaches by its closure, defaults, bound object and named globals."""

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._remembered: list[Remembered] = []
        self._collect_from_function(function, 0)

    def changed(self) -> tuple[str, ...]:
        """Name what is no longer as it was found, in words."""
        words = [one.words for one in self._remembered if one.changed]
        return tuple(dict.fromkeys(words))

    def restore(self) -> None:
        """Put everything back as it was found, unless other threads may have changed it."""
        # What changed may be theirs: a prefetched batch for instance.
        if _other_threads_run():
            return
        for one in self._remembered:
            if one.changed:
                one.restore()

    def _collect(self, name: str, value: Any, variable: Variable | None, depth: int) -> None:
        if depth > DEEPEST or len(self._remembered) >= MOST_VALUES:
            return
        if type(value) in (int, float):
            if variable is not None:
                self._remembered.append(_number(name, value, variable))
            return
        if id(value) in self._seen or isinstance(value, nn.Module | nn.Parameter | type):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._collect_tensor(name, value, variable)
            return
        generator = _generator(name, value)
        if generator is not None:
            self._remembered.append(generator)
        elif not isinstance(value, tuple | set | frozenset | str | bytes):
            self._collect_inside(name, value, depth + 1)

    def _collect_tensor(self, name: str, value: Tensor, variable: Variable | None) -> None:
        # An inference tensor has no version counter.
        if variable is not None and value.numel() <= SMALL and not value.is_inference():
            self._remembered.append(_tensor(name, value, variable))

    def _collect_inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            for key, item in list(value.items()):
                self._collect(f"{name}[{key!r}]", item, _Item(value, key), depth)
        elif isinstance(value, list | deque):
            self._remembered.append(_list(name, value))
            for position, item in enumerate(itertools.islice(value, MOST_VALUES)):
                self._collect(f"{name}[{position}]", item, _Item(value, position), depth)
        elif isinstance(value, functools.partial | FunctionType | MethodType):
            self._collect_from_function(value, depth)
        elif _is_users_object(value):
            for key, item in list(vars(value).items()):
                self._collect(f"{name}.{key}", item, _Attribute(value, key), depth)

    def _collect_from_function(self, function: Any, depth: int) -> None:
        while isinstance(function, functools.partial):
            for key, item in function.keywords.items():
                self._collect(key, item, None, depth)
            for position, item in enumerate(function.args):
                self._collect(f"argument {position}", item, None, depth)
            function = function.func
        if isinstance(function, MethodType):
            self._collect("self", function.__self__, None, depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            self._collect(type(function).__name__, function, None, depth)
            return
        for name, value, variable in _reached(function):
            self._collect(name, value, variable, depth)


def _reached(function: FunctionType) -> Iterator[tuple[str, Any, Variable | None]]:
    """Yield what the code of a function can name without importing or being handed it."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents, _Cell(cell)
        except ValueError:
            # The variable of the enclosing function is not assigned yet.
            continue
    for position, value in enumerate(function.__defaults__ or ()):
        yield f"default {position}", value, None
    if is_users(code.co_filename):
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name], _Item(function.__globals__, name)


def _is_users_object(value: Any) -> bool:
    """True for an instance of a class of the user's own program, not of a library."""
    if not hasattr(value, "__dict__") or isinstance(value, ModuleType):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return file is not None and is_users(file) and "site-packages" not in file


def _other_threads_run() -> bool:
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.name.startswith(HARMLESS_THREADS):
            continue
        if type(thread).__name__ not in HARMLESS_THREADS:
            return True
    return False


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


def _number(name: str, value: float, variable: Variable) -> Remembered:
    put_back = functools.partial(variable.write, value)
    return Remembered(name, "the number", value, variable.read, put_back)


def _tensor(name: str, value: Tensor, variable: Variable) -> Remembered:
    copy = value.detach().clone()
    version = value._version

    def fingerprint() -> object:
        # torch counts the in-place changes of a tensor: no need to compare elements.
        now = variable.read()
        if isinstance(now, Tensor):
            return (id(now), now._version)
        return id(now)

    def put_back() -> None:
        if value._version != version:
            with torch.no_grad():
                value.copy_(copy)
        variable.write(value)

    return Remembered(name, "the tensor", fingerprint(), fingerprint, put_back)


def _generator(name: str, value: Any) -> Remembered | None:
    """Remember a random number generator or a counter; None for anything else."""
    if isinstance(value, torch.Generator):
        return _torch_generator(name, value)
    if isinstance(value, random.Random):
        put_back = functools.partial(value.setstate, value.getstate())
        return Remembered(name, "the generator", value.getstate(), value.getstate, put_back)
    if isinstance(value, itertools.count):
        # Its position can be read and not be set.
        return Remembered(name, "the counter", repr(value), lambda: repr(value), lambda: None)
    # By name: this package does not depend on numpy.
    if type(value).__module__.startswith("numpy.random"):
        return _numpy_generator(name, value)
    return None


def _torch_generator(name: str, value: torch.Generator) -> Remembered:
    def fingerprint() -> object:
        return bytes(value.get_state().tolist())

    put_back = functools.partial(value.set_state, value.get_state())
    return Remembered(name, "the generator", fingerprint(), fingerprint, put_back)


def _numpy_generator(name: str, value: Any) -> Remembered | None:
    """Remember numpy's Generator, or the older RandomState, which hides its bit generator."""
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    if bits is None:
        return None
    state = bits.state

    def put_back() -> None:
        bits.state = state

    return Remembered(name, "the generator", repr(state), lambda: repr(bits.state), put_back)


def _list(name: str, value: list[Any] | deque[Any]) -> Remembered:
    items = list(value)

    def fingerprint() -> object:
        if len(value) > LONG:
            return len(value)
        return [id(item) for item in value]

    def put_back() -> None:
        # Only what was appended is taken away: a list that changed in another way may be shared.
        unchanged_start = all(one is other for one, other in zip(value, items, strict=False))
        if isinstance(value, list) and len(value) > len(items) and unchanged_start:
            del value[len(items) :]

    return Remembered(name, "the list", fingerprint(), fingerprint, put_back)
