"""Which tests start a process: read from the code that a test reaches, before it is run.

`make quick` leaves those tests out. What cannot be seen from the code is marked by hand
(`pytestmark = pytest.mark.process`), and a test of the quick lane that starts a process all the
same fails (`starts_since`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / folder) for folder in ("tests", "benchmarks", "recipes", "examples"))
MODULES = frozenset({"subprocess", "multiprocessing", "torch.multiprocessing"})
"""A function that names one of these modules starts a process."""
CALLS = frozenset({("os", "fork"), ("torch", "compile")})
"""Module and attribute; torch.compile runs a C++ compiler."""
KEYWORDS = frozenset({"num_workers", "multiprocessing_context"})
"""Keyword arguments of a data loader that reads in processes of its own."""
WORKERS = "workers"
"""In the id of a case: its data loader, often made by a table of lambdas, reads in processes."""
FIXTURES = frozenset({"pytester"})
EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"})

_started: list[str] = []


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the marker `process` to every test whose code leads to a process."""
    known: dict[int, bool] = {}
    for item in items:
        if item.get_closest_marker("process") is None and _starts(item, known):
            item.add_marker("process")


def watch_for_processes() -> None:
    """Note every process that this interpreter starts; an audit hook cannot be taken back."""
    sys.addaudithook(_note)


def starts_since(count: int) -> list[str]:
    """Processes started after `count` of them were known."""
    return _started[count:]


def started() -> int:
    return len(_started)


def _note(event: str, arguments: tuple[object, ...], events: frozenset[str] = EVENTS) -> None:
    # a default argument: the module's names are gone when the interpreter ends, the hook is not
    if event in events:
        _started.append(f"{event} {arguments[:2]}")


def _starts(item: pytest.Item, known: dict[int, bool]) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    if names & FIXTURES or WORKERS in item.name:
        return True
    definitions = getattr(item, "_fixtureinfo", None)
    roots: list[object] = [getattr(item, "function", None)]
    for found in getattr(definitions, "name2fixturedefs", {}).values():
        roots += [definition.func for definition in found]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        roots += callspec.params.values()
    return any(reaches_process(root, known) for root in roots)


def reaches_process(value: Any, known: dict[int, bool] | None = None) -> bool:
    """Does a function of ours, or one that it names, start a process?"""
    known = {} if known is None else known
    if isinstance(value, partial):
        return reaches_process(value.func, known)
    if isinstance(value, FunctionType):
        value = inspect.unwrap(value)  # a context manager's own code lies in contextlib
    if id(value) in known:
        return known[id(value)]
    if not _is_ours(value):
        return False
    known[id(value)] = False  # a function that calls itself
    if isinstance(value, type):
        found = any(reaches_process(member, known) for member in _methods(value))
    else:
        found = _function_starts(value, known)
    known[id(value)] = found
    return found


def _function_starts(function: FunctionType, known: dict[int, bool]) -> bool:
    names = set(_names(function.__code__))
    if KEYWORDS & names:
        return True
    reached = [function.__globals__.get(name) for name in names]
    for module in [value for value in reached if isinstance(value, ModuleType)]:
        if module.__name__ in MODULES:
            return True
        if any((module.__name__, name) in CALLS for name in names):
            return True
        if (getattr(module, "__file__", None) or "").startswith(OURS):
            reached += [getattr(module, name, None) for name in names]
    return any(reaches_process(value, known) for value in reached)


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function uses, functions inside it and imports inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments are kept as a tuple
            yield from (word for word in constant if isinstance(word, str))


def _methods(kind: type) -> Iterator[object]:
    for member in vars(kind).values():
        yield getattr(member, "__func__", member)


def _is_ours(value: object) -> bool:
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        return (getattr(module, "__file__", None) or "").startswith(OURS)
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(OURS)
