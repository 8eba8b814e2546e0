"""Count the samples of a batch and cut some of them out. Refuses what might be cut wrongly."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from stepguard.state.batch import children, is_record, with_children
from stepguard.state.plain_data import is_array

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

Layout = Literal["parts", "samples", "constant", "unclear"]
"""Of a list: each entry holds all samples, each is one sample, none depends on samples."""


class UncutError(Exception):
    """A batch that cannot be cut without guessing what its parts mean."""


def row_count(batch: Any) -> int | None:
    """Count the samples; None if the parts do not agree or may not be cut safely."""
    for count in _candidates(batch):
        if _fits(batch, count, root=True):
            return count
    return None


def keep_rows(batch: Any, keep: Sequence[int], count: int) -> Any:
    """Return the batch with only these of its `count` samples, in new tensors, or UncutError."""
    if not _fits(batch, count, root=True):
        raise UncutError(f"not every part has {count} rows")
    return _cut(batch, list(keep), count, root=True)


def samples_in(batch: Any) -> int | None:
    """How many samples a batch has; None where its parts do not agree on a number."""
    try:
        return row_count(batch)
    except Exception:
        # a container class of the user's may raise anything
        return None


def batch_without(batch: Any, rows: Collection[int]) -> Any | None:
    """The batch without these samples, in new tensors; the given one stays as it is.

    None where it cannot be cut safely: its parts have no common first dimension (a graph, a packed
    sequence, a sparse tensor), a class with unknown parts, a row it does not have, or nothing left.
    """
    count = samples_in(batch)
    bad = set(rows)
    if count is None or not bad or len(bad) == count:
        return None
    if min(bad) < 0 or max(bad) >= count:
        return None
    try:
        return keep_rows(batch, [row for row in range(count) if row not in bad], count)
    except Exception:
        # a container class of the user's that cannot be copied, or refuses other sizes
        return None


def part_named(batch: Any, key: str) -> Any:
    """Return the part with this name: a key, field or position, dotted where nested; or None."""
    for child, value in children(batch):
        if child == key:
            return value
        if key.startswith(f"{child}."):
            return part_named(value, key[len(child) + 1 :])
    return None


def _candidates(batch: Any) -> Iterator[int]:
    """Yield possible counts: rows of the first tensor, then lengths of lists with tensors."""
    for part in _parts(batch):
        if isinstance(part, Tensor) and part.dim():
            if _is_dense(part):
                yield int(part.shape[0])
            break
    for part in _parts(batch):
        if isinstance(part, list | tuple) and _holds_tensors(part):
            yield len(part)


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in ATOMS or isinstance(value, PackedSequence):
        return
    for _, child in children(value):
        if type(child) not in ATOMS:
            yield from _parts(child)


def _holds_tensors(value: Any) -> bool:
    if type(value) in ATOMS:
        return False
    return any(isinstance(part, Tensor) for part in _parts(value))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _fits(value: Any, count: int, *, root: bool = False) -> bool:
    """Does every part have one row for each of `count` samples, or not depend on samples?"""
    if isinstance(value, Tensor):
        return _is_dense(value) and _rows_fit(value, count)
    if is_array(value):
        return _rows_fit(value, count)
    if isinstance(value, PackedSequence):
        return False
    if _is_plain_sequence(value):
        return _layout(value, count, root) != "unclear"
    if isinstance(value, Mapping | tuple) or is_record(value):
        return all(_fits(child, count) for _, child in children(value))
    return isinstance(value, CONSTANTS)


def _rows_fit(values: Any, count: int) -> bool:
    """A scalar belongs to all samples; else the first dimension counts them."""
    return not values.ndim or int(values.shape[0]) == count


def _layout(value: Sequence[Any], count: int, root: bool) -> Layout:
    length_fits = len(value) == count
    if not any(_holds_tensors(item) or is_array(item) for item in value):
        return "samples" if length_fits else "constant"
    parts_fit = all(_fits(item, count) for item in value)
    if root:
        return _root_layout(value, length_fits, parts_fit)
    # Both fit: two views of two samples, or two images with two channels.
    if parts_fit == length_fits:
        return "unclear"
    return "parts" if parts_fit else "samples"


def _root_layout(value: Sequence[Any], length_fits: bool, parts_fit: bool) -> Layout:
    if parts_fit:
        return "parts"
    # A tuple (inputs, weights) is not a list of samples; a list of dicts or pairs may be one.
    alike = isinstance(value, list) and len({type(item) for item in value}) == 1
    if length_fits and alike and not isinstance(value[0], Tensor):
        return "samples"
    return "unclear"


def _cut(value: Any, keep: list[int], count: int, *, root: bool = False) -> Any:
    if isinstance(value, Tensor):
        return _cut_tensor(value, keep)
    if is_array(value):
        return value[keep] if value.ndim else value
    if _is_plain_sequence(value):
        return _cut_sequence(value, keep, count, root)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        raise UncutError(f"a {type(value).__name__} cannot be changed")
    return with_children(value, lambda _, item: _cut(item, keep, count))


def _cut_tensor(tensor: Tensor, keep: list[int]) -> Tensor:
    if not tensor.dim():
        return tensor
    chosen = torch.tensor(keep, dtype=torch.long, device=tensor.device)
    return tensor.detach().index_select(0, chosen).requires_grad_(tensor.requires_grad)


def _cut_sequence(value: Sequence[Any], keep: list[int], count: int, root: bool) -> Any:
    layout = _layout(value, count, root)
    if layout == "constant":
        return value
    if layout == "parts":
        items = [_cut(item, keep, count) for item in value]
    else:
        items = [value[row] for row in keep]
    return tuple(items) if type(value) is tuple else items
