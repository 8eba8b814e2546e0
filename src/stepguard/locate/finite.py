"""Test tensors for NaN and Inf. Every tensor of a replay is tested: one pass over the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepguard.tensors.values import local_part

MASK_SHARE = 0.2
"""A tensor with this share of -inf is a mask even if other values differ (position biases)."""


@dataclass(frozen=True, slots=True)
class Flaws:
    """Kinds of non-finite values that a tensor holds."""

    nan: bool = False
    inf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.inf


CLEAN = Flaws()


def numeric(value: Any) -> bool:
    """True for a tensor whose elements can be NaN or infinite."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def plain(tensor: Tensor) -> Tensor:
    """Return the elements as a dense real tensor, in the tensor's own memory.

    Empty where there is nothing to read: on the meta device, or nested without one memory for all.
    """
    if tensor.is_meta or (tensor.is_nested and tensor.layout is torch.strided):
        return torch.empty(0)
    dense = local_part(tensor).detach()
    if dense.layout is not torch.strided:
        # Not coalesce(), which would give new memory: a tensor's maker is known by its memory.
        dense = dense._values() if dense.layout is torch.sparse_coo else dense.values()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense


def flaws(tensor: Tensor) -> Flaws:
    """Say whether there is a NaN or an Inf. Beside a NaN an Inf is not reported."""
    values = plain(tensor)
    # A finite sum proves it. Finite elements may overflow their sum: then the extremes decide.
    if values.numel() == 0 or _finite_sum(values):
        return CLEAN
    return _flaws_by_extremes(values)


def _finite_sum(values: Tensor) -> bool:
    try:
        return math.isfinite(values.sum().item())
    except (RuntimeError, NotImplementedError):
        # torch has no reductions of 8-bit floats.
        return False


def _flaws_by_extremes(values: Tensor) -> Flaws:
    try:
        low, high = torch.aminmax(values)
    except (RuntimeError, NotImplementedError):
        # as above; float32 holds every value of theirs
        low, high = torch.aminmax(values.float())
    # Both extremes of a tensor with a NaN are NaN.
    extremes = (low.item(), high.item())
    return Flaws(nan=any(map(math.isnan, extremes)), inf=any(map(math.isinf, extremes)))


def reach(tensor: Tensor) -> float:
    """Return the largest magnitude among the elements; 0 of none, NaN beside a NaN."""
    values = plain(tensor)
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values.float() if values.element_size() < 4 else values)
    return max(-low.item(), high.item())


def broken(tensor: Tensor) -> Tensor:
    """True where an element is not finite, in the tensor's own shape."""
    bad: Tensor = ~torch.isfinite(tensor.detach())
    return bad


def mask_like(tensor: Tensor) -> bool:
    """True for -inf around a constant, or very much of it: written on purpose, as a mask is."""
    values = plain(tensor)
    if not values.numel() or bool(torch.isnan(values).any()):
        return False
    infinite = torch.isinf(values)
    # A mask is never +inf.
    if bool((values[infinite] > 0).any()):
        return False
    if len(torch.unique(values[~infinite])) <= 1:
        return True
    return float(infinite.double().mean()) >= MASK_SHARE


def storage_key(tensor: Tensor) -> int:
    """Return the address of the memory, shared by every view of it; 0 where there is none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # A wrapper around tensors, a sparse one for instance, has no memory of its own.
        values = plain(tensor)
        if values is tensor:
            return 0
        return values.untyped_storage().data_ptr()
