"""A micro-batch as a tree of named tensors: copy it, pick samples, repair elements."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepguard.state.batch import OUTPUT_GRADIENT
from stepguard.state.batch_rows import keep_rows, row_count

Change = Callable[[str, Tensor], Tensor]


def named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """List every tensor with its name: `batch:x`, `batch:boxes.0`, or `batch` for a bare tensor."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        if not name.startswith(f"batch:{OUTPUT_GRADIENT}."):
            found.append((name, tensor))
        return tensor

    rebuild(batch, note)
    return found


def rebuild(batch: Any, change: Change) -> Any:
    """Build the same tree with every tensor passed through `change`."""
    return _rebuild(batch, change, "batch", ":")


def _rebuild(value: Any, change: Change, name: str, joint: str) -> Any:
    def below(key: object, item: Any) -> Any:
        return _rebuild(item, change, f"{name}{joint}{key}", ".")

    if isinstance(value, Tensor):
        return change(name, value)
    if type(value) is dict:
        return {key: below(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [below(position, item) for position, item in enumerate(value)]
        if isinstance(value, list):
            return items
        # A named tuple takes its items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return _rebuild_object(value, below)


def _rebuild_object(value: Any, below: Callable[[object, Any], Any]) -> Any:
    """Rebuild mappings of other classes, dataclasses, and objects with tensors as attributes."""
    if isinstance(value, MutableMapping):
        twin: Any = copy.copy(value)
        for key, item in value.items():
            twin[key] = below(key, item)
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            # A frozen dataclass refuses setattr.
            object.__setattr__(twin, field.name, below(field.name, getattr(value, field.name)))
        return twin
    if _carries_tensors(value):
        twin = copy.copy(value)
        for key, item in vars(value).items():
            if isinstance(item, Tensor):
                setattr(twin, key, below(key, item))
        return twin
    return value


def _carries_tensors(value: Any) -> bool:
    """True for an object of the user's own class with tensors as attributes; never a module."""
    if isinstance(value, torch.nn.Module | type) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(item, Tensor) for item in vars(value).values())


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
