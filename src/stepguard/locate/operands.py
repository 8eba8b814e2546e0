"""Measure a tensor for an Operand record: extremes, counts and the one element that matters."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from stepguard.locate.finite import broken, numeric, plain
from stepguard.records.origin import Operand
from stepguard.tensors.dtypes import dtype_name
from stepguard.tensors.values import is_finite, local_part

Index = tuple[int, ...]
MOST_COUNTED = 1 << 20
"""Elements whose exponents are counted; of a larger tensor every second, third, ..."""


def summarise(name: str, tensor: Tensor, index: Index | None = None) -> Operand:
    """Count and bound the elements; `index` is shown, by default the first non-finite one."""
    if not numeric(tensor):
        return _summarise_integers(name, tensor, index)
    # An operation on a DTensor would wait for ranks that do not look.
    tensor = local_part(tensor)
    values = plain(tensor)
    clean = is_finite(tensor)
    finite = values
    if not clean:
        finite = values[torch.isfinite(values)]
        if index is None:
            index = first_broken(tensor)
    low, high = _extremes(finite)
    return Operand(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        min=low,
        max=high,
        nan=0 if clean else int(torch.isnan(values).sum()),
        posinf=0 if clean else int(torch.isposinf(values).sum()),
        neginf=0 if clean else int(torch.isneginf(values).sum()),
        zeros=values.numel() - int(torch.count_nonzero(values)),
        index=index,
        value=element(tensor, index),
        exponents=_exponents(finite),
    )


def _exponents(finite: Tensor) -> tuple[tuple[int, int], ...]:
    """Count elements by their binary exponent: which part of the dtype's range they use."""
    flat = finite.flatten()
    part = flat[:: 1 + flat.numel() // MOST_COUNTED]
    if part.dtype is not torch.float64:
        # frexp knows no half precision; single precision holds all of its numbers
        part = part.float()
    part = part[part != 0]
    _, exponents = torch.frexp(part)
    found, counts = torch.unique(exponents, return_counts=True)
    # frexp's mantissas lie from 0.5 to 1
    return tuple((n - 1, count) for n, count in zip(found.tolist(), counts.tolist(), strict=True))


def _summarise_integers(name: str, tensor: Tensor, index: Index | None) -> Operand:
    operand = Operand(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        index=index,
        value=element(tensor, index),
    )
    if tensor.layout is not torch.strided:
        return operand
    low, high = _extremes(tensor)
    zeros = tensor.numel() - int(torch.count_nonzero(tensor))
    return replace(operand, min=low, max=high, zeros=zeros)


def _extremes(values: Tensor) -> tuple[float | None, float | None]:
    if not values.numel():
        return None, None
    return float(values.min()), float(values.max())


def of_number(name: str, value: float) -> Operand:
    """Describe a Python scalar."""
    dtype = "float" if isinstance(value, float) else "int"
    return Operand(name=name, dtype=dtype, value=float(value))


def element(tensor: Tensor, index: Index | None) -> float | None:
    """Return the element; of a complex one the part that is bad, or else its magnitude."""
    if index is None or len(index) != tensor.dim() or tensor.layout is not torch.strided:
        return None
    value = tensor.detach()[index].item()
    if not isinstance(value, complex):
        return float(value)
    for part in (value.real, value.imag):
        if not math.isfinite(part):
            return part
    return abs(value)


def first_broken(tensor: Tensor) -> Index | None:
    """Return the position of the first NaN or Inf."""
    if tensor.layout is not torch.strided:
        return None
    return first_true(broken(tensor))


def first_true(mask: Tensor) -> Index | None:
    """Return the position of the first True."""
    if not bool(mask.any()):
        return None
    # argmax takes no booleans; of several largest elements it returns the first.
    return unravel(int(mask.flatten().to(torch.uint8).argmax()), tuple(mask.shape))


def unravel(flat: int, shape: Index) -> Index:
    """Turn a flat position into one index an axis."""
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def broadcast_index(index: Index, shape: Index) -> Index | None:
    """Return the position in a tensor of this shape that a broadcast puts at `index`."""
    if len(shape) > len(index):
        return None
    # Broadcasting aligns the last axes.
    tail = index[len(index) - len(shape) :]
    position = []
    for at, size in zip(tail, shape, strict=True):
        if size == 1:
            position.append(0)
        elif at < size:
            position.append(at)
        else:
            return None
    return tuple(position)


def broadcasts(shape: Index, to: Index) -> bool:
    """True if a tensor of `shape` can be expanded to `to`."""
    if len(shape) > len(to):
        return False
    return all(size in (1, goal) for size, goal in zip(reversed(shape), reversed(to), strict=False))
