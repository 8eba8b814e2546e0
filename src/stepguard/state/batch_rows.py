"""The samples of a batch: how many it has, and the batch with only some of them. Refuses what might
be cut wrongly.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from stepguard.state.batch import OUTPUT_GRADIENT

CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    PurePath,
    torch.dtype,
    torch.device,
    type(None),
)
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})


class UncutError(Exception):
    """A batch that cannot be cut without guessing what its parts mean."""


def row_count(batch: Any) -> int | None:
    """Samples of the batch; None where its parts do not agree on a number, or are not known to be
    cut safely.
    """
    for count in _candidates(batch):
        if _fits(batch, count, root=True):
            return count
    return None


def keep_rows(batch: Any, keep: Sequence[int], count: int) -> Any:
    """The same batch with only these of its `count` samples, in new tensors. Raises UncutError."""
    if not _fits(batch, count, root=True):
        raise UncutError(f"not every part has {count} rows")
    return _kept(batch, list(keep), count, root=True)


def part_named(batch: Any, key: str) -> Any:
    """The part of a batch with this name: a key, a field, a position, dotted where nested. None
    where there is none.
    """
    for child, value in _children(batch):
        if child == key:
            return value
        if key.startswith(f"{child}."):
            return part_named(value, key[len(child) + 1 :])
    return None


def _candidates(batch: Any) -> Iterator[int]:
    """Numbers of samples it may have: rows of the first tensor, then lengths of lists that hold
    tensors.
    """
    tensors = [part for part in _parts(batch) if isinstance(part, Tensor)]
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    if first is not None and first.layout is torch.strided and not first.is_nested:
        yield int(first.shape[0])
    for part in _parts(batch):
        if isinstance(part, list | tuple) and _holds_tensors(part):
            yield len(part)


def _parts(value: Any) -> Iterator[Any]:
    yield value
    for _, child in _children(value):
        if type(child) not in ATOMS:
            yield from _parts(child)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in ATOMS or isinstance(value, Tensor | PackedSequence):
        return
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items() if key != OUTPUT_GRADIENT)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(position), item) for position, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _holds_tensors(value: Any) -> bool:
    if type(value) in ATOMS:
        return False
    return any(isinstance(part, Tensor) for part in _parts(value))


def _fits(value: Any, count: int, *, root: bool = False) -> bool:
    """Has every part of it one row for each of `count` samples, or none of a sample at all?"""
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not value.is_nested
        return plain and (not value.dim() or int(value.shape[0]) == count)
    if _is_array(value):
        return not value.ndim or int(value.shape[0]) == count
    if isinstance(value, PackedSequence):
        return False
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return _is_structure(value, count, root) is not None
    if isinstance(value, Mapping | tuple) or dataclasses.is_dataclass(value):
        return all(_fits(child, count) for _, child in _children(value))
    return isinstance(value, CONSTANTS)


def _is_structure(value: Sequence[Any], count: int, root: bool) -> bool | None:
    """True: a list of parts, each with all samples; False: one entry for each sample; None: it
    cannot be told.
    """
    length_fits = len(value) == count
    if not any(_holds_tensors(item) or _is_array(item) for item in value):
        return not length_fits
    parts_fit = all(_fits(item, count) for item in value)
    if root:
        if parts_fit:
            return True
        # a tuple (inputs, weights) is no list of samples, a list of dicts or pairs may be one
        alike = isinstance(value, list) and len({type(item) for item in value}) == 1
        return False if length_fits and alike and not isinstance(value[0], Tensor) else None
    if parts_fit and length_fits:
        return None  # two views of two samples, or two images with two channels
    if parts_fit:
        return True
    return False if length_fits else None


def _kept(value: Any, keep: list[int], count: int, *, root: bool = False) -> Any:
    if isinstance(value, Tensor):
        if not value.dim():
            return value
        chosen = torch.tensor(keep, dtype=torch.long, device=value.device)
        return value.detach().index_select(0, chosen).requires_grad_(value.requires_grad)
    if _is_array(value):
        return value[keep] if value.ndim else value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        whole = type(value) if type(value) in (list, tuple) else list
        if _is_structure(value, count, root):
            constant = not any(_holds_tensors(item) or _is_array(item) for item in value)
            return value if constant else whole(_kept(item, keep, count) for item in value)
        return whole(value[row] for row in keep)
    if isinstance(value, tuple):
        return type(value)(*(_kept(item, keep, count) for item in value))
    return _kept_object(value, keep, count)


def _kept_object(value: Any, keep: list[int], count: int) -> Any:
    if type(value) is dict:
        return {key: _kept(item, keep, count) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        twin: Any = copy.copy(value)
        for key, item in value.items():
            twin[key] = _kept(item, keep, count)
        return twin
    if isinstance(value, Mapping):
        raise UncutError(f"a {type(value).__name__} cannot be changed")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, _kept(getattr(value, field.name), keep, count))
        return twin
    return value


def _is_array(value: Any) -> bool:
    """An array of numpy, without importing it."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
