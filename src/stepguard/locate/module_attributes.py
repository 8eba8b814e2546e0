"""Tensors and numbers that a module keeps outside its parameters and buffers: `self.center`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stepguard.tensors.names import named_modules

KEPT = "attr:"
"""Prefix of the name under which the trace knows such a tensor; not part of the public contract."""
MOST_ITEMS = 64
"""Entries of a list or dict that are searched."""


def kept_tensors(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield name (`attr:head.center`) and tensor, also inside lists, tuples and dicts."""
    for path, module in named_modules(roots):
        for key, value in vars(module).items():
            if not key.startswith("_"):
                yield from _inside(f"{KEPT}{path}.{key}".replace(":.", ":"), value)


def bad_numbers(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    """Yield plain numbers on modules that are NaN or infinite."""
    for path, module in named_modules(roots):
        for key, value in vars(module).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{path}.{key}".strip("."), value


def _inside(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    items: list[tuple[object, Any]] = []
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        items = list(enumerate(value[:MOST_ITEMS]))
    elif isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
    for key, item in items:
        if isinstance(item, Tensor):
            yield f"{name}[{key!r}]", item
