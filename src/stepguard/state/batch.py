"""Walk a batch, whatever containers it is made of: name its tensors, rebuild it with others."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from stepguard.tensors.names import dotted
from stepguard.tensors.values import is_finite

OUTPUT_GRADIENT = "output gradient"
"""Key beside the arguments of a recorded model call: the gradients that its outputs received.
They are not part of the batch.
"""


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of everything directly inside a container; nothing for a leaf."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items() if key != OUTPUT_GRADIENT)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from zip(map(str, itertools.count()), value, strict=False)
    elif is_record(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        yield from tensor_attributes(value)


def with_children(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Build the same container with `change(key, child)` in the place of every child."""
    if type(value) is dict:
        return {key: change(str(key), item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # A named tuple takes its items one by one.
        return type(value)(*map(change, value._fields, value))
    if isinstance(value, list | tuple):
        items = [change(str(position), item) for position, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, MutableMapping):
        twin: Any = copy.copy(value)
        for key, item in value.items():
            twin[key] = change(str(key), item)
        return twin
    return _object_with_children(value, change)


def _object_with_children(value: Any, change: Callable[[str, Any], Any]) -> Any:
    attributes = list(children(value))
    if not attributes or isinstance(value, Mapping):
        return value
    twin = copy.copy(value)
    for name, item in attributes:
        # A frozen dataclass refuses setattr.
        object.__setattr__(twin, name, change(name, item))
    return twin


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (`x`, tensor) for mappings, (`0`, tensor) for sequences, dotted where nested.

    The name of a batch that is one tensor is "".
    """
    if isinstance(batch, Tensor):
        yield name, batch
        return
    for key, value in children(batch):
        yield from named_tensors(value, dotted(name, key))


def tensor_label(name: str) -> str:
    """Return `batch:x`, or `batch` for a batch that is one tensor."""
    if not name:
        return "batch"
    return f"batch:{name}"


def bad_batch_tensors(batches: tuple[Any, ...]) -> list[str]:
    """Return `batch:KEY` of every tensor with a non-finite element, each named once."""
    labels: list[str] = []
    for batch in batches:
        for name, tensor in named_tensors(batch):
            label = tensor_label(name)
            if label not in labels and not is_finite(tensor):
                labels.append(label)
    return labels


def is_record(value: Any) -> bool:
    """True for an instance of a dataclass; a dataclass itself is not one."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensor_attributes(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on an object of the user's own class; never those of a module."""
    if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__"):
        return
    for name, item in vars(value).items():
        if isinstance(item, Tensor):
            yield name, item
