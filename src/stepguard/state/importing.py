"""Importing a function the user names, from below the current directory and nowhere else on the
machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepguard._errors import StepguardError


@contextmanager
def importable() -> Iterator[None]:
    """The current directory first, as for `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def import_function(named: str, error: type[StepguardError]) -> Callable[..., Any]:
    """`module:function`. Everything that goes wrong is raised as `error`, with the way out."""
    module, _, function = named.partition(":")
    find_module(module, named, error)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as fault:
        raise error(f"{named}: importing it failed: {type(fault).__name__}: {fault}") from fault
    if not callable(found):
        raise error(f"{named}: {module!r} has no function {function!r}.")
    result: Callable[..., Any] = found
    return result


def find_module(module: str, named: str, error: type[StepguardError]) -> None:
    """Look from the outside in: finding a module imports the packages around it, which must be the
    user's too.
    """
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            spec = (
                importlib.util.find_spec(name)
                if all(part.isidentifier() for part in parts)
                else None
            )
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise error(
                f"{named}: there is no module {name!r} below the current directory; run this in "
                f"the project's folder."
            )
        located = (
            [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations
        )
        for place in located or ["/"]:  # built into the interpreter: nowhere below here
            inside(Path(place), named, error)


def inside(path: Path, named: str, error: type[StepguardError]) -> Path:
    """The resolved path, if it lies below the current directory."""
    resolved = path.resolve()
    if not resolved.is_relative_to(Path.cwd()):
        raise error(
            f"{named} lies outside the current directory; run this in the project's folder."
        )
    return resolved
