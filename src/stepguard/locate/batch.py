"""A micro-batch as a tree of named tensors: copy it, pick samples, repair elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepguard.state.batch import OUTPUT_GRADIENT, tensor_label, with_children
from stepguard.state.batch import named_tensors as tensors_of_batch
from stepguard.state.batch_rows import keep_rows, row_count
from stepguard.tensors.names import dotted

Change = Callable[[str, Tensor], Tensor]


def named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """List every tensor with its name: `batch:x`, `batch:boxes.0`, or `batch` for a bare tensor."""
    return [(tensor_label(name), tensor) for name, tensor in tensors_of_batch(batch)]


def rebuild(batch: Any, change: Change) -> Any:
    """Build the same tree with every tensor passed through `change`."""
    return _rebuild(batch, change, "")


def _rebuild(value: Any, change: Change, name: str) -> Any:
    if isinstance(value, Tensor):
        return change(tensor_label(name), value)
    return with_children(value, lambda key, item: _rebuild(item, change, dotted(name, key)))


def duplicate(batch: Any) -> Any:
    """Copy every tensor: a loss function may change its batch or collect gradients in it."""

    def own(name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return rebuild(batch, own)


def repaired(batch: Any, names: frozenset[str]) -> Any:
    """Put the mean of the named tensors in the place of their every NaN and Inf."""

    def mend(name: str, tensor: Tensor) -> Tensor:
        if name not in names:
            return tensor
        finite = torch.isfinite(tensor)
        # Not 0, which could break a division by itself.
        usual = torch.ones((), dtype=tensor.dtype)
        if bool(finite.any()):
            usual = tensor[finite].mean()
        return torch.where(finite, tensor, usual.to(tensor.dtype)).detach()

    return rebuild(batch, mend)


def sample_count(batch: Any) -> int:
    """Count the samples: what all parts agree on, else the first leading size, else 0."""
    agreed = row_count(batch)
    if agreed is not None:
        return agreed
    for _, tensor in named_tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return 0


def subset(batch: Any, keep: Sequence[int], count: int) -> Any:
    """Keep only these samples. Tensors and lists whose leading size is not `count` stay whole."""
    recorded_call = isinstance(batch, Mapping) and OUTPUT_GRADIENT in batch
    if not recorded_call and row_count(batch) == count:
        return keep_rows(batch, keep, count)
    chosen = torch.tensor(keep, dtype=torch.long)

    def pick(name: str, tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != count:
            return tensor
        rows = tensor.detach().index_select(0, chosen.to(tensor.device))
        return rows.requires_grad_(tensor.requires_grad)

    return rebuild(_pick_lists(batch, keep, count), pick)


def _pick_lists(value: Any, keep: Sequence[int], count: int) -> Any:
    """Pick from lists with one entry a sample, such as file names or images of different sizes."""
    if type(value) is dict:
        return {key: _pick_lists(item, keep, count) for key, item in value.items()}
    if not isinstance(value, list) or len(value) != count:
        return value
    if any(_has_rows(item, count) for item in value):
        # Each entry holds all samples: as many tensors as samples is a coincidence.
        return value
    return [value[sample] for sample in keep]


def _has_rows(item: Any, count: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == count
