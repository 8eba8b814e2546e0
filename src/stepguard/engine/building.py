"""Code of the user's own project, by name: only what lies below the current directory is ever imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepguard._errors import CapsuleError


@contextmanager
def importable() -> Iterator[None]:
    """The current directory first, as for `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def import_function(build: str) -> Callable[[], Any]:
    """`module:function`, from below the current directory only."""
    module, _, function = build.partition(":")
    find_module(module, build)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as fault:
        raise CapsuleError(f"{build}: importing it failed: {type(fault).__name__}: {fault}") from fault
    if not callable(found):
        raise CapsuleError(f"{build}: {module!r} has no function {function!r}.")
    result: Callable[[], Any] = found
    return result


def find_module(module: str, named: str) -> None:
    """Look from the outside in: finding a module imports the packages around it, which must be the user's too."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            spec = importlib.util.find_spec(name) if all(part.isidentifier() for part in parts) else None
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise CapsuleError(
                f"{named}: there is no module {name!r} below the current directory; run this in the project's folder."
            )
        located = [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations
        for place in located or ["/"]:  # built into the interpreter: nowhere below here
            _inside(Path(place), named)


def _inside(path: Path, named: str) -> Path:
    resolved = path.resolve()
    if not resolved.is_relative_to(Path.cwd()):
        raise CapsuleError(f"{named} lies outside the current directory; run this in the project's folder.")
    return resolved


def below_here(path: Path) -> Path:
    """A capsule may name code of the user's project, nothing else on the machine."""
    resolved = _inside(path, str(path))
    if not resolved.is_file():
        raise CapsuleError(f"{path} does not exist here; run this in the project's folder, or pass script= or build=.")
    return resolved
