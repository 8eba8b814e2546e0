"""Import a function by its name, from below the current directory and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from stepguard._errors import StepguardError


@contextmanager
def importable() -> Iterator[None]:
    """Put the current directory first on the path, as `python -m` does."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


Check = Callable[[Path], None]
"""Raises for a file whose code must not be run."""


def import_function(
    named: str, error: type[StepguardError], check: Check = lambda path: None
) -> Callable[..., Any]:
    """Import `module:function`. Whatever goes wrong is raised as `error`, with the way out."""
    module, _, function = named.partition(":")
    find_module(module, named, error, check)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as fault:
        raise error(f"{named}: importing it failed: {type(fault).__name__}: {fault}") from fault
    if not callable(found):
        raise error(f"{named}: {module!r} has no function {function!r}.")
    result: Callable[..., Any] = found
    return result


def find_module(
    module: str, named: str, error: type[StepguardError], check: Check = lambda path: None
) -> list[Path]:
    """The module's files, after it and the packages around it were found below the current folder.

    `check` is asked about each before anything is imported.
    """
    parts = module.split(".")
    found: list[Path] = []
    # From the outside in: finding a module imports the packages around it.
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _spec(name)
        if spec is None:
            raise error(
                f"{named}: there is no module {name!r} below the current directory; run this in "
                f"the project's folder."
            )
        found = [inside(Path(place), named, error) for place in _files(spec)]
        for place in found:
            check(place)
    return found


def _spec(name: str) -> ModuleSpec | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _files(spec: ModuleSpec) -> list[str]:
    if spec.has_location and spec.origin:
        return [spec.origin]
    # A package without a file, or a module built into the interpreter, which is not below here.
    return list(spec.submodule_search_locations or ["/"])


def inside(path: Path, named: str, error: type[StepguardError]) -> Path:
    """Return the resolved path; raise `error` if it is not below the current directory."""
    resolved = path.resolve()
    if not resolved.is_relative_to(Path.cwd()):
        raise error(
            f"{named} lies outside the current directory; run this in the project's folder."
        )
    return resolved
