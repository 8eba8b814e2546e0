"""Find the user's line behind an operation: the innermost frame outside torch and stepguard."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as registry
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stepguard import numerics
from stepguard.records import Edit
from stepguard.records.incident import Origin, Statement
from stepguard.tensors.names import named_modules, names_by_id
from stepguard.tensors.torch_private import next_sequence_number

# --- Find the module of an operation: by the call stack, or in the backward by node numbers.


class ModuleSpans:
    """Follow the named modules through forward calls; a context manager that owns its two hooks."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.names = names_by_id(named_modules(roots))
        self.extra = tuple(prefix for prefix in roots if prefix)
        self._stack: list[tuple[str, int, RemovableHandle | None]] = []
        self._spans: list[tuple[int, int, str]] = []
        """First autograd node that was created inside a module, the one after the last, name."""
        self._hooks = ExitStack()
        self.observer: Any = None
        """Object whose `enter_module(args)` and `leave_module(module, args, output)` are called."""

    def __enter__(self) -> ModuleSpans:
        enter = registry.register_module_forward_pre_hook(self._begin)
        # A checkpointed block ends its recomputation by an exception once it has what it needs:
        # without always_call the module would stay on the stack.
        leave = registry.register_module_forward_hook(self._end, always_call=True)
        self._hooks.callback(enter.remove)
        self._hooks.callback(leave.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.close()

    @property
    def current(self) -> str | None:
        """Innermost module whose forward is running; None outside every module."""
        if self._stack:
            return self._stack[-1][0]
        return None

    @property
    def depth(self) -> int:
        """How many modules are running, one inside the other."""
        return len(self._stack)

    def created(self, sequence: int) -> str | None:
        """Return the innermost module in which the autograd node of this number was created."""
        found: tuple[int, int, str] | None = None
        for span in self._spans:
            if not span[0] <= sequence < span[1]:
                continue
            # Of modules that span the same nodes the inner one has ended first.
            if found is None or span[1] - span[0] < found[1] - found[0]:
                found = span
        if found is None:
            return None
        return found[2]

    def belongs_to_model(self, name: str | None) -> bool:
        """False outside every module and in an extra module such as a criterion."""
        return name is not None and name.partition(".")[0] not in self.extra

    def _begin(self, module: nn.Module, args: Any) -> None:
        if id(module) in self.names:
            if self.observer is not None:
                self.observer.enter_module(args)
            last = self._after_hooks(module) if module._forward_hooks else None
            self._stack.append((self.names[id(module)], next_sequence_number(), last))

    def _after_hooks(self, module: nn.Module) -> RemovableHandle:
        """What the module's own hooks do belongs to it, and they run after those of all modules."""

        def end(module: nn.Module, args: Any, output: Any) -> None:
            # a module that calls itself runs this for the inner call as well
            if self._stack and self._stack[-1][2] is handle:
                handle.remove()
                self._leave(module, args, output)

        handle = module.register_forward_hook(end, always_call=True)
        return handle

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self.names and self._stack and self._stack[-1][2] is None:
            self._leave(module, args, output)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.observer is not None:
            self.observer.leave_module(module, args, output)
        name, first, _ = self._stack.pop()
        self._spans.append((first, next_sequence_number(), name))


# --- Run the user's program with other lines in one of its files; nothing on disk changes.


class PatchError(Exception):
    """The lines cannot be changed in the running program."""


SEEN = "_stepguard_seen"
"""Name under which a trial looks at the value of an expression."""


@contextmanager
def with_edits(edits: Sequence[Edit], needs: Sequence[str]) -> Iterator[None]:
    """Run with these changes of the program. `needs`: functions of stepguard.numerics in them."""
    files: dict[str, list[str]] = {}
    # from the end, so that the lines of those before stay where they are
    for edit in sorted(edits, key=lambda one: one.line, reverse=True):
        lines = files.get(edit.file) or linecache.getlines(edit.file)
        files[edit.file] = edited(lines, [edit])
    with with_files(files, needs):
        yield


@contextmanager
def with_files(
    files: Mapping[str, Sequence[str]], needs: Iterable[str], **names: Any
) -> Iterator[None]:
    """Run with these lines as the source of these files. `needs`, `names`: globals of theirs.

    Raises PatchError where that is not possible.
    """
    names.update({name: getattr(numerics, name) for name in needs})
    with ExitStack() as undo:
        for file, lines in files.items():
            _patch(file, lines, names, undo)
        yield


def _patch(file: str, lines: Sequence[str], names: Mapping[str, Any], undo: ExitStack) -> None:
    swaps = _swapped_codes(file, linecache.getlines(file), lines)
    functions = [one for one in gc.get_objects() if type(one) is FunctionType]
    functions = [one for one in functions if one.__code__.co_filename == file]
    functions = [one for one in functions if one.__code__ in swaps]
    if not functions:
        raise PatchError("its source has changed since it was loaded")
    for one in functions:
        space = one.__globals__
        for name, value in names.items():
            if name not in space:
                space[name] = value
                undo.callback(space.pop, name, None)
            elif space[name] is not value:
                raise PatchError(f"{name} is a name of the program already")
        undo.callback(setattr, one, "__code__", one.__code__)
        one.__code__ = swaps[one.__code__]
    # what is located in the changed program is quoted from the changed source
    entry = linecache.cache.get(file)
    if entry is not None:
        undo.callback(linecache.cache.__setitem__, file, entry)
    undo.callback(linecache.cache.pop, file, None)
    linecache.cache[file] = (sum(map(len, lines)), None, list(lines), file)


def edited(lines: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    """The lines of a file with these changes; as many as before, so that all others stay put.

    Raises PatchError where the lines are not those that the edits were made for.
    """
    changed = list(lines)
    for edit in edits:
        start = edit.line - 1
        stop = start + len(edit.old)
        if tuple(line.rstrip("\n") for line in changed[start:stop]) != edit.old:
            raise PatchError("its source has changed since the incident")
        new = [f"{line}\n" for line in edit.new]
        changed[start:stop] = new + ["\n"] * (len(edit.old) - len(new))
    return changed


def difference(file: str, old: Sequence[str], new: Sequence[str]) -> tuple[Edit, ...]:
    """What turns the one into the other; both have the same number of lines."""
    edits: list[Edit] = []
    for changed, lines in groupby(range(len(old)), key=lambda number: old[number] != new[number]):
        if changed:
            numbers = list(lines)
            before = tuple(old[number].rstrip("\n") for number in numbers)
            # empty lines fill up what was several lines and is one
            after = tuple(new[number].rstrip("\n") for number in numbers if new[number].strip())
            edits.append(Edit(file=file, line=numbers[0] + 1, old=before, new=after))
    return tuple(edits)


def _swapped_codes(
    file: str, before: Sequence[str], after: Sequence[str]
) -> dict[CodeType, CodeType]:
    """Old code -> new code, for every function that is not the same in both."""
    swaps: dict[CodeType, CodeType] = {}
    waiting = [(_compiled(file, before), _compiled(file, after))]
    while waiting:
        old, new = waiting.pop()
        if old == new:
            continue
        if old.co_freevars != new.co_freevars:
            raise PatchError(f"{old.co_name} would close over other variables")
        swaps[old] = new
        inside = [
            [one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)
        ]
        if len(inside[0]) != len(inside[1]):
            raise PatchError(f"{old.co_name} would hold other functions")
        waiting += zip(*inside, strict=True)
    return swaps


def _compiled(file: str, lines: Sequence[str]) -> CodeType:
    # cells of a notebook may await at their top level
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        code: CodeType = compile("".join(lines), file, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise PatchError(f"it does not compile: {fault}") from None
    return code


# --- Find the user's line behind an operation: the innermost frame outside torch and stepguard.


CONTEXT_LINES = 2
_TORCH = str(Path(torch.__file__).parent)
_STEPGUARD = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_paths()["stdlib"]
_CHECKPOINT = str(Path(_TORCH, "utils", "checkpoint.py"))
_ENGINE = str(Path(_TORCH, "autograd", "graph.py"))
_REPLAYS = tuple(str(Path(__file__).with_name(name)) for name in ("replay.py", "origins.py"))
"""Files that call the user's code: frames outside them asked for the replay."""


_GENERATED = re.compile(r"[/\\]([a-z2-7]{2})[/\\]c\1[a-z2-7]{49}\.py$")
"""What torch.compile has written into its cache, by a digest."""
_LIBRARIES = re.compile(r"^.*[/\\\\](?:site|dist)-packages[/\\\\]")
"""What comes before the name of an installed package."""


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int
    code: CodeType | None = None
    """The running code, and the instruction in it: they tell which part of the line it was."""
    instruction: int = -1
    library: tuple[str, int] | None = None
    """File and line of an installed package that this line has called, where the operation is."""


NOWHERE = Line("", 0)
_last_line: dict[int, Line] = {}
"""What `user_line` returned last, by where its search began."""


@cache
def is_users(file: str) -> bool:
    """True for a file outside torch, stepguard, the standard library and generated code."""
    # `<string>` and the like have no file; the cells of a notebook are the user's code.
    if file.startswith("<") and "ipython" not in file:
        return False
    if file.startswith((_TORCH, _STEPGUARD)) or _GENERATED.search(file):
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)


@cache
def in_library(file: str) -> bool:
    """True for a file of an installed package: the user can read it, but not mend it."""
    return _LIBRARIES.match(file) is not None


def user_line(out: int = 1) -> Line | None:
    """Return the line of the operation that is being dispatched, in a forward pass.

    The search begins `out` frames out of this one.

    The innermost line of the user's project; where an installed package was called from there, its
    own line is beside it.
    """
    frame: FrameType | None = sys._getframe(out)
    library: Line | None = None
    last = _last_line.get(out, NOWHERE)
    if frame is not None and frame.f_code is last.code and frame.f_lasti == last.instruction:
        # a loop calls its model from the same place in every step
        return last
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            if not in_library(file):
                found = _of_frame(frame, library)
                if library is None:
                    _last_line[out] = found
                return found
            library = library or _of_frame(frame, None)
        # A package that runs the whole step, as a trainer does, was called before the replay.
        if file in _REPLAYS and library is None:
            return None
        frame = frame.f_back
    if library is None:
        return None
    return library._replace(library=library[:2])


def user_function() -> str | None:
    """Name the user's function that is running: `Attention.forward`; None for a script's lines."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        # `<lambda>` and `<module>` are no names.
        name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
        if is_users(file) and not name.startswith("<"):
            return name
        if file in _REPLAYS:
            return None
        frame = frame.f_back
    return None


def _of_frame(frame: FrameType, library: Line | None) -> Line:
    within = None if library is None else library[:2]
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code, frame.f_lasti, within)


def backward_caller() -> tuple[Line | None, bool]:
    """Return the user's line behind the operation that is being dispatched, in a backward pass.

    None where torch acts alone. The second value is True inside the second forward of a
    checkpointed block. User code runs there only inside a custom Function, or because a checkpoint
    computes its forward again. Whichever of the engine and the checkpoint is nearer says which pass
    the operation belongs to.
    """
    frame: FrameType | None = sys._getframe(1)
    line = None
    while frame is not None:
        file = frame.f_code.co_filename
        if line is None and is_users(file):
            line = _of_frame(frame, None)
            if in_library(file):
                line = line._replace(library=line[:2])
        # `unpack_hook` itself only hands the saved tensor to the backward node.
        if file == _CHECKPOINT and frame.f_code.co_name != "unpack_hook":
            return line, True
        if file == _ENGINE or file in _REPLAYS:
            break
        frame = frame.f_back
    return line, False


def variable_name(value: object) -> str | None:
    """What the user calls an object: the innermost variable, attribute of `self` or global name.

    Names in the user's own files come before those in the frames of libraries.
    """
    found: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            own = _name_in(frame, value)
            if own is not None and "site-packages" not in file:
                return own
            found = found or own
        frame = frame.f_back
    return found


def _name_in(frame: FrameType, value: object) -> str | None:
    local = frame.f_locals
    try:
        # a class with slots has no such dictionary
        attributes = getattr(local.get("self"), "__dict__", {})
        for names in (local, attributes, frame.f_globals):
            name: str
            for name, held in list(names.items()):
                # accelerate gives the user a wrapper with the real optimizer inside
                inner = held.__dict__.get("optimizer") if isinstance(held, Optimizer) else None
                if (held is value or inner is value) and name.isidentifier() and name[0] != "_":
                    return name
        return None
    finally:
        # Until Python 3.13 a function's frame keeps this copy, and with it what the user deletes.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(local) is dict:
            local.clear()


def spell(line: Line | None) -> str | None:
    """Spell `file.py:88`, relative to the current directory where the file lies below it.

    In a notebook `cell [3], line 5`, by the number the cell had when it ran.
    """
    if line is None:
        return None
    cell = cell_number(line.file)
    if cell is not None:
        return f"cell [{cell}], line {line.number}"
    if in_library(line.file):
        return f"{_LIBRARIES.sub('', line.file)}:{line.number}"
    path = Path(line.file)
    name = path.name
    # ValueError: elsewhere. OSError: the current directory has been removed.
    with contextlib.suppress(ValueError, OSError):
        name = str(path.relative_to(Path.cwd()))
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


def statement(line: Line | None) -> Statement | None:
    """Quote the statement of the user's that the operation is part of, and mark that part."""
    if line is None or line.code is None or line.library is not None:
        return None
    begin, end, column, end_column = list(line.code.co_positions())[line.instruction // 2]
    if begin is None or end is None or column is None or end_column is None:
        return None
    lines = linecache.getlines(line.file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    around = [
        (node.lineno, _header_end(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= begin and end <= _header_end(node)
    ]
    if not around:
        return None
    first, last = max(around)
    text = "".join(lines[first - 1 : last]).rstrip("\n")
    starts = [0]
    for one in lines[first - 1 : last]:
        starts.append(starts[-1] + len(one.encode()))
    return Statement(
        file=line.file,
        line=first,
        text=text,
        start=starts[begin - first] + column,
        end=starts[end - first] + end_column,
    )


def _header_end(node: ast.stmt) -> int:
    """The last line of a statement; of one that holds others, the line before the first."""
    inner: list[ast.stmt] = getattr(node, "body", [])
    if inner:
        return max(node.lineno, inner[0].lineno - 1)
    return node.end_lineno or node.lineno


def with_source(origin: Origin, line: Line | None) -> Origin:
    """The origin with its place in the source, as far as it is known."""
    inside = None if line is None or line.library is None else spell(Line(*line.library))
    return replace(
        origin,
        source=spell(line),
        library=inside,
        context=context(line),
        statement=statement(line),
    )


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
