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
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.source import is_users
from stepguard.state.batch import named_tensors as tensors_of_batch
from stepguard.state.batch import rebuild, tensor_label
from stepguard.state.batch import sample_count as sample_count
from stepguard.state.batch import subset as subset
from stepguard.state.python_state import KeptLeaf, KeptTensor, keep_generator
from stepguard.tensors.names import named_modules

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


class KeptVariable:
    """A number or a tensor in a variable, an attribute or an item of `owner`."""

    def __init__(self, owner: Any, key: Any, value: Any) -> None:
        self._owner = owner
        self._key = key
        self._value = value
        self._content = KeptTensor(value) if isinstance(value, Tensor) else None

    def moved(self, seen: set[int]) -> bool:
        """Is it another object, or another number, or has the tensor been written to?"""
        now = None
        if isinstance(self._owner, CellType):
            now = self._owner.cell_contents
        elif isinstance(self._owner, list | deque):
            now = None
            if self._key < len(self._owner):
                now = self._owner[self._key]
        else:
            now = self._owner.get(self._key)
        if self._content is not None:
            return now is not self._value or self._content.moved(seen)
        # A NaN differs from itself, but NaN before and after is not a change.
        both_nan = now != now and self._value != self._value
        return bool(now != self._value) and not both_nan

    def restore(self, seen: set[int]) -> None:
        """Put the value back, and the very object."""
        if self._content is not None:
            self._content.restore(seen)
        if isinstance(self._owner, CellType):
            self._owner.cell_contents = self._value
        else:
            self._owner[self._key] = self._value


class LossFunctionState:
    """Everything a function reaches by its closure, defaults, bound object and named globals."""

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._kept: list[tuple[str, KeptVariable | KeptLeaf]] = []
        self._collect_from_function(function, 0)

    def changed(self) -> tuple[str, ...]:
        """Name what is no longer as it was found, in words."""
        return tuple(dict.fromkeys(words for words, kept in self._kept if kept.moved(set())))

    def restore(self) -> None:
        """Put everything back as it was found, unless other threads may have changed it."""
        for thread in threading.enumerate():
            harmless = thread.name.startswith(HARMLESS_THREADS)
            harmless = harmless or type(thread).__name__ in HARMLESS_THREADS
            if thread is not threading.current_thread() and not harmless:
                # What changed may be its: a prefetched batch for instance.
                return
        for _, kept in self._kept:
            if kept.moved(set()):
                kept.restore(set())

    def _collect(self, name: str, value: Any, owner: Any, key: Any, depth: int) -> None:
        """`owner`: what holds the value under `key`; None where it cannot be replaced."""
        if depth > DEEPEST or len(self._kept) >= MOST_VALUES:
            return
        if type(value) in (int, float):
            if owner is not None:
                self._kept.append((f"the number `{name}`", KeptVariable(owner, key, value)))
            return
        if id(value) in self._seen or isinstance(value, nn.Module | nn.Parameter | type):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            # An inference tensor has no version counter.
            if owner is not None and value.numel() <= SMALL and not value.is_inference():
                self._kept.append((f"the tensor `{name}`", KeptVariable(owner, key, value)))
            return
        generator = keep_generator(value)
        if generator is not None:
            kind = "generator"
            if isinstance(value, itertools.count):
                kind = "counter"
            self._kept.append((f"the {kind} `{name}`", generator))
        else:
            self._collect_inside(name, value, depth)

    def _collect_inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            for inner, item in list(value.items()):
                self._collect(f"{name}[{inner!r}]", item, value, inner, depth + 1)
        elif isinstance(value, list | deque):
            self._kept.append((f"the list `{name}`", _keep_list(value)))
            for position, item in enumerate(itertools.islice(value, MOST_VALUES)):
                self._collect(f"{name}[{position}]", item, value, position, depth + 1)
        elif isinstance(value, functools.partial | FunctionType | MethodType):
            self._collect_from_function(value, depth + 1)
        elif _is_users_object(value):
            for inner, item in list(vars(value).items()):
                self._collect(f"{name}.{inner}", item, vars(value), inner, depth + 1)

    def _collect_from_function(self, function: Any, depth: int) -> None:
        while isinstance(function, functools.partial):
            for key, item in function.keywords.items():
                self._collect(key, item, None, None, depth)
            for position, item in enumerate(function.args):
                self._collect(f"argument {position}", item, None, None, depth)
            function = function.func
        if isinstance(function, MethodType):
            self._collect("self", function.__self__, None, None, depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            self._collect(type(function).__name__, function, None, None, depth)
            return
        # What the code of the function can name without importing or being handed it.
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                # The variable of the enclosing function is not assigned yet.
                continue
            self._collect(name, value, cell, None, depth)
        for position, value in enumerate(function.__defaults__ or ()):
            self._collect(f"default {position}", value, None, None, depth)
        if is_users(code.co_filename):
            space = function.__globals__
            for name in code.co_names:
                if name in space:
                    self._collect(name, space[name], space, name, depth)


def _is_users_object(value: Any) -> bool:
    """True for an instance of a class of the user's own program, not of a library."""
    if not hasattr(value, "__dict__") or isinstance(value, ModuleType):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return file is not None and is_users(file) and "site-packages" not in file


def _keep_list(value: list[Any] | deque[Any]) -> KeptLeaf:
    items = list(value)

    def drop_appended(live: Any, saved: object) -> None:
        # Only what was appended is taken away: a list that changed in another way may be shared.
        unchanged_start = all(one is other for one, other in zip(live, items, strict=False))
        if isinstance(live, list) and len(live) > len(items) and unchanged_start:
            del live[len(items) :]

    return KeptLeaf(
        value,
        lambda live: len(live) if len(live) > LONG else [id(item) for item in live],
        drop_appended,
    )


# --- A micro-batch as a tree of named tensors: copy it, pick samples, repair elements.


def named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """List every tensor with its name: `batch:x`, `batch:boxes.0`, or `batch` for a bare tensor."""
    return [(tensor_label(name), tensor) for name, tensor in tensors_of_batch(batch)]


def duplicate(batch: Any) -> Any:
    """Copy every tensor: a loss function may change its batch or collect gradients in it."""
    return rebuild(batch, lambda _, t: t.detach().clone().requires_grad_(t.requires_grad))


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
            known = [median(self._recent)]
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
        self._fruitless[place] += 1
        if found:
            self._fruitless[place] = 0


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
            if key.startswith("_"):
                continue
            name = f"{KEPT}{path}.{key}".replace(":.", ":")
            items: list[tuple[object, Any]] = []
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, list | tuple):
                items = list(enumerate(value[:MOST_ITEMS]))
            elif isinstance(value, dict):
                items = list(value.items())[:MOST_ITEMS]
            for inner, item in items:
                if isinstance(item, Tensor):
                    yield f"{name}[{inner!r}]", item


def bad_numbers(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    """Yield plain numbers on modules that are NaN or infinite."""
    for path, module in named_modules(roots):
        for key, value in vars(module).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{path}.{key}".strip("."), value
