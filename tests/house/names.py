"""Rules on names: modules a stranger would search for, and one class for one word."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

_WORDS = """
    again anew arming birth bits climbs common deaf ear early entry examine feed filling handler
    handlers helper helpers hidden hold inert late lent machine manager managers micro misc outlet
    overhear places plain planning runaway settle shield sides spare stuff tame taps things tools
    util utils volunteers whole wild window written
"""
BANNED = frozenset(_WORDS.split())
"""Adverbs, metaphors and words that fit every file: nobody finds a module by them."""


def banned(paths: Iterable[PurePosixPath]) -> list[str]:
    """Modules whose name is a banned word, or an adverb."""
    found = []
    for path in paths:
        name = path.stem.strip("_")
        if name in BANNED or name.endswith("ly"):
            found.append(str(path))
    return found


def repeated(paths: Iterable[PurePosixPath]) -> dict[str, list[str]]:
    """Base names that occur twice below one top-level package; `__init__` is left out."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in paths:
        if path.stem != "__init__":
            places[path.parts[0], path.name].append(str(path))
    return {name: found for (_, name), found in places.items() if len(found) > 1}


def classes_twice(sources: Mapping[PurePosixPath, str]) -> dict[str, list[str]]:
    """Class names without a leading underscore that more than one module defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    return {name: found for name, found in places.items() if len(found) > 1}
