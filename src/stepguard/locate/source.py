"""Find the user's line behind an operation: the innermost frame outside torch and stepguard."""

from __future__ import annotations

import contextlib
import linecache
import re
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
_REPLAYS = tuple(str(Path(__file__).with_name(name)) for name in ("replay.py", "update_origin.py"))
"""Files that call the user's code: frames outside them asked for the replay."""


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int


class Caller(NamedTuple):
    """The code that asked for an operation of the backward pass."""

    line: Line | None
    """The user's line, or None when torch acted alone, as in most of a backward pass."""
    recomputed: bool
    """True inside the second forward of a checkpointed block."""


@cache
def is_users(file: str) -> bool:
    """True for a file outside torch, stepguard, the standard library and generated code."""
    # `<string>` and the like have no file; the cells of a notebook are the user's code.
    if file.startswith("<") and "ipython" not in file:
        return False
    if file.startswith((_TORCH, _STEPGUARD)):
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)


def user_line() -> Line | None:
    """Return the line of the operation that is being dispatched, in a forward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return Line(file, frame.f_lineno)
        if file in _REPLAYS:
            return None
        frame = frame.f_back
    return None


def backward_caller() -> Caller:
    """Return the caller of the operation that is being dispatched, in a backward pass.

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
        # `unpack_hook` itself only hands the saved tensor to the backward node.
        if file == _CHECKPOINT and frame.f_code.co_name != "unpack_hook":
            return Caller(line, recomputed=True)
        if file == _ENGINE or file in _REPLAYS:
            break
        frame = frame.f_back
    return Caller(line, recomputed=False)


def spell(line: Line | None) -> str | None:
    """Spell `file.py:88`, relative to the current directory where the file lies below it.

    In a notebook `cell [3], line 5`, by the number the cell had when it ran.
    """
    if line is None:
        return None
    cell = cell_number(line.file)
    if cell is not None:
        return f"cell [{cell}], line {line.number}"
    path = Path(line.file)
    name = path.name
    # ValueError: elsewhere. OSError: the current directory has been removed.
    with contextlib.suppress(ValueError, OSError):
        name = str(path.relative_to(Path.cwd()))
    if "site-packages" in name:
        name = path.name
    return f"{name}:{line.number}"


def cell_number(file: str) -> int | None:
    """Number of the notebook cell that was compiled under this name; None where it is a file."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    # What IPython's own tracebacks say: ("Cell", "In[3]"). A shell of another make may not.
    compiler = getattr(ipython.get_ipython(), "compile", None)
    named_by = getattr(compiler, "format_code_name", None)
    if named_by is None:
        return None
    named = named_by(file)
    digits = re.sub(r"\D", "", named[1]) if named else ""
    return int(digits) if digits else None


def context(line: Line | None) -> tuple[str, ...]:
    """Quote the line and its neighbours, each with its number; the line itself is marked."""
    if line is None:
        return ()
    first = max(1, line.number - CONTEXT_LINES)
    shown = []
    for number in range(first, line.number + CONTEXT_LINES + 1):
        text = linecache.getline(line.file, number).rstrip()
        mark = ">" if number == line.number else " "
        if text:
            shown.append(f"{mark} {number} | {text}")
    return tuple(shown)
