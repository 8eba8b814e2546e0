"""Numbers on the tensors around an operation: extremes, counts, and the one element that matters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepguard.locate.finite import broken, numeric, plain
from stepguard.records.origin import Operand
from stepguard.tensors.dtypes import dtype_name
from stepguard.tensors.values import is_finite

Index = tuple[int, ...]


def summarise(name: str, tensor: Tensor, index: Index | None = None) -> Operand:
    """Counts and extremes; `index` is the element to show, by default the first non-finite one."""
    shape = tuple(tensor.shape)
    if not numeric(tensor):
        return _of_integers(name, tensor, index)
    values = plain(tensor)
    clean = is_finite(tensor)
    finite = values if clean else values[torch.isfinite(values)]
    low, high = (None, None) if not finite.numel() else (float(finite.min()), float(finite.max()))
    if index is None and not clean:
        index = first_broken(tensor)
    return Operand(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=shape,
        min=low,
        max=high,
        nan=0 if clean else int(torch.isnan(values).sum()),
        posinf=0 if clean else int(torch.isposinf(values).sum()),
        neginf=0 if clean else int(torch.isneginf(values).sum()),
        zeros=values.numel() - int(torch.count_nonzero(values)),
        index=index,
        value=element(tensor, index),
    )


def _of_integers(name: str, tensor: Tensor, index: Index | None) -> Operand:
    zeros = (
        tensor.numel() - int(torch.count_nonzero(tensor)) if tensor.layout is torch.strided else 0
    )
    low = high = None
    if tensor.numel() and tensor.layout is torch.strided:
        low, high = float(tensor.min()), float(tensor.max())
    return Operand(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        min=low,
        max=high,
        zeros=zeros,
        index=index,
        value=element(tensor, index),
    )


def of_number(name: str, value: float) -> Operand:
    """A Python scalar."""
    return Operand(
        name=name, dtype="float" if isinstance(value, float) else "int", value=float(value)
    )


def element(tensor: Tensor, index: Index | None) -> float | None:
    """The element, for a complex one the part that is bad or else its magnitude."""
    if index is None or len(index) != tensor.dim() or tensor.layout is not torch.strided:
        return None
    value = tensor.detach()[index].item()
    if isinstance(value, complex):
        parts = [p for p in (value.real, value.imag) if not math.isfinite(p)]
        return parts[0] if parts else abs(value)
    return float(value)


def first_broken(tensor: Tensor) -> Index | None:
    """Position of the first NaN or Inf."""
    if tensor.layout is not torch.strided:
        return None
    return first_true(broken(tensor))


def first_true(mask: Tensor) -> Index | None:
    """Position of the first True."""
    if not bool(mask.any()):
        return None
    return unravel(int(mask.flatten().to(torch.uint8).argmax()), tuple(mask.shape))


def unravel(flat: int, shape: Index) -> Index:
    """A flat position as one index an axis."""
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def broadcast_index(index: Index, shape: Index) -> Index | None:
    """The position in a tensor of this shape that a broadcast puts at `index`."""
    if len(shape) > len(index):
        return None
    tail = index[len(index) - len(shape) :]
    if any(size != 1 and at >= size for at, size in zip(tail, shape, strict=True)):
        return None
    return tuple(0 if size == 1 else at for at, size in zip(tail, shape, strict=True))


def broadcasts(shape: Index, to: Index) -> bool:
    """Can a tensor of `shape` be expanded to `to`?"""
    if len(shape) > len(to):
        return False
    return all(size in (1, goal) for size, goal in zip(reversed(shape), reversed(to), strict=False))
