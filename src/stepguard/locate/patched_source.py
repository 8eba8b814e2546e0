"""Run the user's program with other lines in one of its files; nothing on disk changes.

The changed source is compiled, and every live function whose code comes from the changed part gets
the new code for as long as the block lasts. Functions that are made anew at each call (closures,
lambdas in a forward) come from the code of the function around them, which is changed as well.
"""

from __future__ import annotations

import ast
import gc
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

from stepguard import numerics
from stepguard.records import Edit

SEEN = "_stepguard_seen"
"""Name under which a trial looks at the value of an expression."""


class PatchError(Exception):
    """The lines cannot be changed in the running program."""


@contextmanager
def patched(file: str, lines: Sequence[str], names: Mapping[str, Any]) -> Iterator[None]:
    """Run with these lines as the source of `file`. `names`: globals that they need.

    Raises PatchError before anything is changed.
    """
    swaps = _swapped_codes(file, linecache.getlines(file), lines)
    originals = [(one, one.__code__) for one in _functions_of(file) if one.__code__ in swaps]
    if not originals:
        raise PatchError("its source has changed since it was loaded")
    added = _missing_names([one.__globals__ for one, _ in originals], names)
    entry = linecache.cache.get(file)
    try:
        for space, name in added:
            space[name] = names[name]
        for one, code in originals:
            one.__code__ = swaps[code]
        # what is located in the changed program is quoted from the changed source
        linecache.cache[file] = (sum(map(len, lines)), None, list(lines), file)
        yield
    finally:
        for one, code in originals:
            one.__code__ = code
        for space, name in added:
            space.pop(name, None)
        linecache.cache.pop(file, None)
        if entry is not None:
            linecache.cache[file] = entry


def _functions_of(file: str) -> list[FunctionType]:
    """Every live function that was compiled from this file."""
    functions = [one for one in gc.get_objects() if type(one) is FunctionType]
    return [one for one in functions if one.__code__.co_filename == file]


def _missing_names(
    spaces: Iterable[dict[str, Any]], names: Mapping[str, Any]
) -> list[tuple[dict[str, Any], str]]:
    """What has to be added to which globals; PatchError where a name means something else there."""
    missing = []
    for space in {id(one): one for one in spaces}.values():
        for name, value in names.items():
            if name not in space:
                missing.append((space, name))
            elif space[name] is not value:
                raise PatchError(f"{name} is a name of the program already")
    return missing


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
    """Run with these lines as the source of these files."""
    names.update({name: getattr(numerics, name) for name in needs})
    with ExitStack() as stack:
        for file, lines in files.items():
            stack.enter_context(patched(file, lines, names))
        yield


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
    number = 0
    while number < len(old):
        if old[number] == new[number]:
            number += 1
            continue
        first = number
        while number < len(old) and old[number] != new[number]:
            number += 1
        before = tuple(line.rstrip("\n") for line in old[first:number])
        # empty lines fill up what was several lines and is one
        after = tuple(line.rstrip("\n") for line in new[first:number] if line.strip())
        edits.append(Edit(file=file, line=first + 1, old=before, new=after))
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
