"""State of a loss function's own: generators, counters, lists, tensors outside batch and modules.

A replay cannot put back what was never remembered, so a loss function with such state may give
another answer the second time. Its state is collected only once a step is bad: what changes when
the step runs again is named, and put back afterwards. State of modules is not collected here: it is
remembered before the step.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepguard.locate.source import is_users
from stepguard.state.batch import OUTPUT_GRADIENT, keep_rows, row_count, tensor_label, with_children
from stepguard.state.batch import named_tensors as tensors_of_batch
from stepguard.tensors.names import dotted, named_modules

# --- State of a loss function's own: generators, counters, lists, tensors outside batch and
# modules.


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


# --- A micro-batch as a tree of named tensors: copy it, pick samples, repair elements.


Change = Callable[[str, Tensor], Tensor]


def named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """List every tensor with its name: `batch:x`, `batch:boxes.0`, or `batch` for a bare tensor."""
    return [(tensor_label(name), tensor) for name, tensor in tensors_of_batch(batch)]


def rebuild(batch: Any, change: Change) -> Any:
    """Build the same tree with every tensor passed through `change`."""
    return _rebuild(batch, change, "")


def _rebuild(value: Any, change: Change, name: str) -> Any:
    if isinstance(value, Tensor):
        return change(tensor_label(name), value)
    return with_children(value, lambda key, item: _rebuild(item, change, dotted(name, key)))


def duplicate(batch: Any) -> Any:
    """Copy every tensor: a loss function may change its batch or collect gradients in it."""

    def own(name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return rebuild(batch, own)


def repaired(batch: Any, names: frozenset[str]) -> Any:
    """Put the mean of the named tensors in the place of their every NaN and Inf."""

    def mend(name: str, tensor: Tensor) -> Tensor:
        if name not in names:
            return tensor
        finite = torch.isfinite(tensor)
        # Not 0, which could break a division by itself.
        usual = torch.ones((), dtype=tensor.dtype)
        if bool(finite.any()):
            usual = tensor[finite].mean()
        return torch.where(finite, tensor, usual.to(tensor.dtype)).detach()

    return rebuild(batch, mend)


def sample_count(batch: Any) -> int:
    """Count the samples: what all parts agree on, else the first leading size, else 0."""
    agreed = row_count(batch)
    if agreed is not None:
        return agreed
    for _, tensor in named_tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return 0


def subset(batch: Any, keep: Sequence[int], count: int) -> Any:
    """Keep only these samples. Tensors and lists whose leading size is not `count` stay whole."""
    recorded_call = isinstance(batch, Mapping) and OUTPUT_GRADIENT in batch
    if not recorded_call and row_count(batch) == count:
        return keep_rows(batch, keep, count)
    chosen = torch.tensor(keep, dtype=torch.long)

    def pick(name: str, tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != count:
            return tensor
        rows = tensor.detach().index_select(0, chosen.to(tensor.device))
        return rows.requires_grad_(tensor.requires_grad)

    return rebuild(_pick_lists(batch, keep, count), pick)


def _pick_lists(value: Any, keep: Sequence[int], count: int) -> Any:
    """Pick from lists with one entry a sample, such as file names or images of different sizes."""
    if type(value) is dict:
        return {key: _pick_lists(item, keep, count) for key, item in value.items()}
    if not isinstance(value, list) or len(value) != count:
        return value
    if any(_has_rows(item, count) for item in value):
        # Each entry holds all samples: as many tensors as samples is a coincidence.
        return value
    return [value[sample] for sample in keep]


def _has_rows(item: Any, count: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == count


# --- Limit the time that locating an incident may take, in steps of the bare run.


FLOOR = 0.3
"""Seconds that are always allowed: where steps are short, six of them are next to nothing."""
RECENT = 16
"""Steps whose times stand for a bare step."""
MOST_FRUITLESS = 3
"""Searches that may end without a sample before one place is no longer searched for samples."""
TRACING_STEPS = 20.0
"""Tracing a loop may add this many times the budget of locating one incident."""
TRACING_FLOOR = 5.0
"""Seconds that tracing may add in any case."""


class OutOfTimeError(Exception):
    """The next replay does not fit into the budget."""


class LocateBudget:
    """The budget of one guard's incidents, and which searches were in vain in earlier ones."""

    def __init__(self, steps: float = 6.0, clock: Callable[[], float] | None = None) -> None:
        self.steps = steps
        self.tracing = False
        """The loop runs under the tracer, so its steps are not bare."""
        self.cut: list[str] = []
        """What was left out of the present incident, in sentences."""
        self.whole_only: set[Hashable] = set()
        """Kinds of batches that the user's code takes whole or not at all."""
        self._added_by_tracing = 0.0
        self._fruitless: Counter[Hashable] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._given_clock = clock
        self._clock = clock or time.perf_counter
        self._began = 0.0
        self._traced: float | None = None

    def took(self, seconds: float) -> None:
        """Note how long a step of the loop took."""
        if self.tracing:
            self._added_by_tracing += max(seconds - self.bare_seconds, 0.0)
        else:
            self._recent.append(seconds)

    def begin_tracing(self) -> None:
        """Start to count what tracing the loop adds."""
        self._added_by_tracing = 0.0

    @property
    def tracing_too_long(self) -> bool:
        """True if tracing has added more time than it may."""
        return self._added_by_tracing > max(TRACING_FLOOR, self.tracing_limit * self.bare_seconds)

    @property
    def tracing_limit(self) -> float:
        """Bare steps that tracing may add."""
        return TRACING_STEPS * self.steps

    @property
    def bare_seconds(self) -> float:
        """Seconds of a step of the bare run; 0 if unknown."""
        known = []
        if self._recent:
            known.append(median(self._recent))
        # The traced step does the same and more, so it is an upper bound.
        if self._traced is not None:
            known.append(self._traced)
        return min(known, default=0.0)

    def begin(self, *, on_host: bool) -> None:
        """Start a new incident. `on_host`: the model runs on the CPU."""
        if self._given_clock is None:
            self._clock = clock_for(on_host=on_host)
        self._began = self._clock()
        self._traced = None
        self.cut = []

    @contextmanager
    def first_trace(self) -> Iterator[None]:
        """Leave the first traced run out of the budget: without it nothing is known at all."""
        began = self._clock()
        yield
        took = self._clock() - began
        if self._traced is None:
            self._traced = took
            self._began += took

    def affords(self, steps: float) -> bool:
        """True if there is time for this many more runs of the step."""
        limit = max(FLOOR, self.steps * self.bare_seconds)
        return self._clock() - self._began + steps * self.bare_seconds <= limit

    def require(self, steps: float) -> None:
        """Raise OutOfTimeError if there is no time for this many more runs of the step."""
        if not self.affords(steps):
            raise OutOfTimeError

    def leave_out(self, what: str) -> None:
        """Say what the budget did not allow."""
        self.cut.append(
            f"cut short: {what} would take more than {self.steps:g} bare steps (locate_budget)"
        )

    def in_vain(self, place: Hashable) -> bool:
        """True if the search for samples has found none at this place several times."""
        return self._fruitless[place] >= MOST_FRUITLESS

    def searched(self, place: Hashable, *, found: bool) -> None:
        """Note whether a search for samples at this place found any."""
        if found:
            self._fruitless[place] = 0
        else:
            self._fruitless[place] += 1


def clock_for(*, on_host: bool) -> Callable[[], float]:
    """Choose the clock that a budget is measured with."""
    # On the CPU the time of this thread counts, so that a busy machine changes no answer. On a
    # device the thread only waits.
    if on_host:
        return time.thread_time
    return time.perf_counter


# --- Tensors and numbers that a module keeps outside its parameters and buffers: `self.center`.


KEPT = "attr:"
"""Prefix of the name under which the trace knows such a tensor; not part of the public contract."""
MOST_ITEMS = 64
"""Entries of a list or dict that are searched."""


def kept_tensors(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield name (`attr:head.center`) and tensor, also inside lists, tuples and dicts."""
    for path, module in named_modules(roots):
        for key, value in vars(module).items():
            if not key.startswith("_"):
                yield from _inside(f"{KEPT}{path}.{key}".replace(":.", ":"), value)


def bad_numbers(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    """Yield plain numbers on modules that are NaN or infinite."""
    for path, module in named_modules(roots):
        for key, value in vars(module).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{path}.{key}".strip("."), value


def _inside(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    items: list[tuple[object, Any]] = []
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        items = list(enumerate(value[:MOST_ITEMS]))
    elif isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
    for key, item in items:
        if isinstance(item, Tensor):
            yield f"{name}[{key!r}]", item
