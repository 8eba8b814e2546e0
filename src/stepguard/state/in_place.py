"""Put saved values into live ones: the same tensors and containers where they fit."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

from stepguard.state.batch import is_record
from stepguard.state.tree_json import key_from_json, tree_from_json
from stepguard.tensors.sharding import is_distributed, sharded_like
from stepguard.tensors.values import local_part


class Refill:
    """Puts one saved state back. A tensor that was kept once and referred to twice is made once."""

    def __init__(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._parameters = parameters
        self._made: dict[str, Tensor] = {}

    def value(self, live: Any, structure: Any, like: Tensor | None = None) -> Any:
        """Return the saved value; the live object itself, refilled, if it can hold it.

        `like`: the parameter that the value belongs to; a tensor that is made goes where that is.
        """
        if "tensor" in structure:
            return self._tensor(live, structure, like)
        if "mapping" in structure and isinstance(live, MutableMapping):
            return self._mapping(live, structure, like)
        if type(live) in (list, tuple, deque):
            return self._sequence(live, structure, like)
        return self._record(live, structure, like)

    def _tensor(self, live: Any, structure: Any, like: Tensor | None) -> Tensor:
        name = structure["tensor"]
        kept = self._tensors[name]
        if isinstance(live, Tensor):
            own = local_part(live.detach())
            if (own.shape, own.dtype) == (kept.shape, kept.dtype):
                own.copy_(kept)
                return live
        if name not in self._made:
            value = tree_from_json(structure, self._tensors)
            self._made[name] = value if like is None else _placed_like(like, value)
        return self._made[name]

    def _mapping(self, live: MutableMapping[Any, Any], structure: Any, like: Tensor | None) -> Any:
        saved: dict[Any, Any] = {}
        for key, item in structure["mapping"]:
            saved[key_from_json(key, self._parameters)] = item
        for key in [key for key in live if key not in saved]:
            del live[key]
        for key, item in saved.items():
            live[key] = self.value(live.get(key), item, like)
        return live

    def _sequence(self, live: Any, structure: Any, like: Tensor | None) -> Any:
        if type(live) is list and "list" in structure:
            live[:] = self._items(live, structure["list"], like)
            return live
        if type(live) is tuple and "tuple" in structure:
            return tuple(self._items(live, structure["tuple"], like))
        if type(live) is deque and "deque" in structure and live.maxlen == structure["most"]:
            items = self._items(live, structure["deque"], like)
            live.clear()
            live.extend(items)
            return live
        return self._new(structure)

    def _record(self, live: Any, structure: Any, like: Tensor | None) -> Any:
        if "named" in structure and isinstance(live, tuple) and hasattr(live, "_replace"):
            return live._replace(**self._fields(live, structure["named"], like))
        if "fields" in structure and is_record(live):
            return dataclasses.replace(live, **self._fields(live, structure["fields"], like))
        return self._new(structure)

    def _new(self, structure: Any) -> Any:
        return tree_from_json(structure, self._tensors, self._parameters)

    def _items(self, live: Any, saved: list[Any], like: Tensor | None) -> list[Any]:
        old = list(live)[: len(saved)]
        old += [None] * (len(saved) - len(old))
        return [self.value(mine, item, like) for mine, item in zip(old, saved, strict=True)]

    def _fields(self, live: Any, saved: list[Any], like: Tensor | None) -> dict[str, Any]:
        return {name: self.value(getattr(live, name, None), item, like) for name, item in saved}


def _placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    # Counters stay on the host, as torch's own optimizers keep them.
    if not value.dim():
        return value
    placed = value.to(parameter.device)
    if is_distributed(parameter) and value.shape == local_part(parameter.detach()).shape:
        return sharded_like(parameter, placed)
    return placed


def in_containers_of(live: Any, value: Any) -> Any:
    """Return the value in the containers of the live one: a Counter stays a Counter."""
    if isinstance(live, Mapping) and isinstance(value, Mapping):
        items = {key: in_containers_of(live.get(key), item) for key, item in value.items()}
        return _mapping_like(live, items)
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        return value.to(live.device)
    if not isinstance(live, list | tuple) or not isinstance(value, list | tuple):
        return value
    if len(live) != len(value):
        return value
    return type(value)(map(in_containers_of, live, value))


def _mapping_like(live: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(live) is dict or not isinstance(live, MutableMapping):
        return items
    # A copy keeps what the class adds, such as the factory of a defaultdict.
    twin = copy.copy(live)
    twin.clear()
    twin.update(items)
    return twin
