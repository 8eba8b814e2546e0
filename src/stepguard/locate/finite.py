"""Is every element finite? Asked of every tensor of a replay, so the answer must cost one pass over
the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASK_SHARE = 0.2
"""With at least this share of -inf a tensor is a mask even if its other values differ, as with
position biases.
"""


@dataclass(frozen=True, slots=True)
class Flaws:
    """Which kinds of non-finite value a tensor holds."""

    nan: bool = False
    inf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.inf


CLEAN = Flaws()


def numeric(value: Any) -> bool:
    """A tensor whose elements can be NaN or infinite."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def plain(tensor: Tensor) -> Tensor:
    """The elements as a dense real tensor: values of a sparse one, real and imaginary parts of a
    complex one.

    None at all where there is nothing to read: on the meta device, or nested without one memory for
    all.
    """
    if tensor.is_meta or (tensor.is_nested and tensor.layout is torch.strided):
        return torch.empty(0)
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense._values() if dense.layout is torch.sparse_coo else dense.values()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense


def flaws(tensor: Tensor) -> Flaws:
    """NaN or Inf. Beside a NaN an Inf goes unmentioned: the extremes of a tensor with NaN are NaN."""
    values = plain(tensor)
    if values.numel() == 0 or _finite_sum(values):
        return CLEAN
    return _flaws_by_extremes(values)


def _finite_sum(values: Tensor) -> bool:
    try:
        return math.isfinite(values.sum().item())
    except (RuntimeError, NotImplementedError):  # 8-bit floats know no reductions
        return False


def _flaws_by_extremes(values: Tensor) -> Flaws:
    try:
        low, high = torch.aminmax(values)
    except (RuntimeError, NotImplementedError):  # 8-bit floats, again
        low, high = torch.aminmax(values.float())
    extremes = (low.item(), high.item())
    return Flaws(nan=any(map(math.isnan, extremes)), inf=any(map(math.isinf, extremes)))


def broken(tensor: Tensor) -> Tensor:
    """True where an element is not finite, in the tensor's own shape."""
    bad: Tensor = ~torch.isfinite(tensor.detach())
    return bad


def mask_like(tensor: Tensor) -> bool:
    """-inf around a constant, or very much of it: written on purpose, as a mask is. A mask is never
    +inf.
    """
    values = plain(tensor)
    if not values.numel() or bool(torch.isnan(values).any()):
        return False
    infinite = torch.isinf(values)
    if bool((values[infinite] > 0).any()):
        return False
    return (
        len(torch.unique(values[~infinite])) <= 1 or float(infinite.double().mean()) >= MASK_SHARE
    )


def storage_key(tensor: Tensor) -> int:
    """Address of the memory, shared by every view of it; 0 where there is none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper around tensors has no memory of its own
        values = plain(tensor)
        return values.untyped_storage().data_ptr() if values is not tensor else 0
