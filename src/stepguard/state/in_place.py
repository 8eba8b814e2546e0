"""Saved values back into live ones: the same tensors and containers where they fit, new ones where
they do not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from stepguard.state.tree_json import key_back, put_together


class Refill:
    """Puts one saved state back. A tensor that was kept once and referred to twice is made once."""

    def __init__(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        self._tensors, self._parameters = tensors, parameters
        self._made: dict[str, Tensor] = {}

    def value(self, live: Any, structure: Any, device: torch.device | None = None) -> Any:
        """The saved value; the live object itself, refilled, where that can hold it."""
        if "tensor" in structure:
            return self._tensor(live, structure, device)
        if "mapping" in structure and isinstance(live, MutableMapping):
            return self._mapping(live, structure, device)
        if "list" in structure and type(live) is list:
            live[:] = self._items(live, structure["list"], device)
            return live
        if "tuple" in structure and type(live) is tuple:
            return tuple(self._items(live, structure["tuple"], device))
        if "deque" in structure and type(live) is deque and live.maxlen == structure["most"]:
            items = self._items(list(live), structure["deque"], device)
            live.clear()
            live.extend(items)
            return live
        if "named" in structure and isinstance(live, tuple) and hasattr(live, "_replace"):
            return live._replace(**self._fields(live, structure["named"], device))
        if "fields" in structure and dataclasses.is_dataclass(live) and not isinstance(live, type):
            return dataclasses.replace(live, **self._fields(live, structure["fields"], device))
        return put_together(structure, self._tensors, self._parameters)

    def _tensor(self, live: Any, structure: Any, device: torch.device | None) -> Tensor:
        name = structure["tensor"]
        kept = self._tensors[name]
        if isinstance(live, Tensor) and (live.shape, live.dtype) == (kept.shape, kept.dtype):
            live.detach().copy_(kept)
            return live
        if name not in self._made:
            value = put_together(structure, self._tensors)
            # counters stay on the host, as torch's own optimizers keep them
            self._made[name] = value.to(device) if device is not None and value.dim() else value
        return self._made[name]

    def _mapping(
        self, live: MutableMapping[Any, Any], structure: Any, device: torch.device | None
    ) -> Any:
        saved = {key_back(key, self._parameters): item for key, item in structure["mapping"]}
        for key in [key for key in live if key not in saved]:
            del live[key]
        for key, item in saved.items():
            live[key] = self.value(live.get(key), item, device)
        return live

    def _items(self, live: Any, saved: list[Any], device: torch.device | None) -> list[Any]:
        old = list(live)[: len(saved)] + [None] * (len(saved) - len(live))
        return [self.value(mine, item, device) for mine, item in zip(old, saved, strict=True)]

    def _fields(self, live: Any, saved: list[Any], device: torch.device | None) -> dict[str, Any]:
        return {name: self.value(getattr(live, name, None), item, device) for name, item in saved}


def alike(live: Any, value: Any) -> Any:
    """The value with the containers of the live one: a Counter stays a Counter, a defaultdict keeps
    its factory.
    """
    if isinstance(live, Mapping) and isinstance(value, Mapping):
        items = {key: alike(live.get(key), item) for key, item in value.items()}
        if type(live) is dict or not isinstance(live, MutableMapping):
            return items
        same_kind = copy.copy(live)
        same_kind.clear()
        same_kind.update(items)
        return same_kind
    if (
        isinstance(live, list | tuple)
        and isinstance(value, list | tuple)
        and len(live) == len(value)
    ):
        return type(value)(alike(a, b) for a, b in zip(live, value, strict=True))
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        return value.to(live.device)
    return value
