"""The user's source line behind an operation: innermost frame that is neither torch's nor
stepguard's.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

CONTEXT_LINES = 2
_TORCH = str(Path(torch.__file__).parent)
_STEPGUARD = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_paths()["stdlib"]
_CHECKPOINT = str(Path(_TORCH, "utils", "checkpoint.py"))
_ENGINE = str(Path(_TORCH, "autograd", "graph.py"))
_REPLAY = frozenset(str(Path(__file__).with_name(name)) for name in ("replay.py", "update.py"))
"""Frames outside these are whoever asked for the replay, not the user's code in it."""


class Line(NamedTuple):
    """A place in a file."""

    file: str
    number: int


class Caller(NamedTuple):
    """Who asked for an operation."""

    line: Line | None
    """The user's line, or None when torch acted alone, as in most of a backward pass."""
    recomputed: bool
    """True inside a checkpointed block's second forward."""


@cache
def is_users(file: str) -> bool:
    """Neither torch, stepguard, the standard library nor generated code."""
    if file.startswith("<") and "ipython" not in file:
        return False
    if file.startswith((_TORCH, _STEPGUARD)):
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)


def user_line() -> Line | None:
    """Of the operation that is being dispatched, in a forward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return Line(file, frame.f_lineno)
        if file in _REPLAY:
            return None
        frame = frame.f_back
    return None


def backward_caller() -> Caller:
    """Of the operation that is being dispatched, in a backward pass.

    User code runs there only inside a custom Function, or because a checkpoint computes its forward
    again. Whichever of the engine and the checkpoint is nearer says which pass the operation
    belongs to.
    """
    frame: FrameType | None = sys._getframe(1)
    line = None
    while frame is not None:
        file = frame.f_code.co_filename
        if line is None and is_users(file):
            line = Line(file, frame.f_lineno)
        if file == _CHECKPOINT and frame.f_code.co_name != "unpack_hook":
            return Caller(line, recomputed=True)
        if file == _ENGINE or file in _REPLAY:
            break
        frame = frame.f_back
    return Caller(line, recomputed=False)


def spell(line: Line | None) -> str | None:
    """`file.py:88`, relative to the current directory where the file lies below it."""
    if line is None:
        return None
    path = Path(line.file)
    name = path.name
    with contextlib.suppress(ValueError, OSError):
        name = str(path.relative_to(Path.cwd()))
    return f"{name if 'site-packages' not in name else path.name}:{line.number}"


def context(line: Line | None) -> tuple[str, ...]:
    """The line and its neighbours, each with its number; the line itself is marked."""
    if line is None:
        return ()
    shown = []
    for number in range(max(1, line.number - CONTEXT_LINES), line.number + CONTEXT_LINES + 1):
        text = linecache.getline(line.file, number).rstrip()
        if text:
            shown.append(f"{'>' if number == line.number else ' '} {number} | {text}")
    return tuple(shown)
