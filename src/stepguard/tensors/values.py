"""Read the values of any tensor: sparse, sharded, complex, eight-bit, lazy or without data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy as has_no_shape_yet

from stepguard.tensors.torch_private import MKLDNN

# --- Read the values of any tensor: sparse, sharded, complex, eight-bit, lazy or without data.


HALVES = (torch.float16, torch.bfloat16)
PLAIN = (Tensor, nn.Parameter)
ORDINARY = frozenset({torch.float32, torch.float64, *HALVES})
"""Floating-point dtypes that every operation takes."""


def is_lazy(tensor: Tensor) -> bool:
    """True for a parameter or buffer of a lazy module before its first call: no shape, no data."""
    return bool(has_no_shape_yet(tensor))


def elements(tensor: Tensor) -> int:
    """Count the elements; a lazy parameter has none yet."""
    if is_lazy(tensor):
        return 0
    return tensor.numel()


def is_expanded(tensor: Tensor) -> bool:
    """True for a view that repeats its elements: it cannot be written in place."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in sizes)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that is on this rank; any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    if local is None:
        return tensor
    part: Tensor = local()
    return part


def dense_values(tensor: Tensor) -> Tensor:
    """Return the stored values as a plain tensor: sparse values, the local shard of a DTensor."""
    tensor = local_part(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout is not torch.strided:
        return tensor.values()
    return tensor


def dense_real(tensor: Tensor) -> Tensor:
    """Return `dense_values` in a dtype that reductions take; empty where nothing can be read."""
    ordinary = type(tensor) in PLAIN and tensor.dtype in ORDINARY and tensor.layout is torch.strided
    is_plain = ordinary and not (tensor.is_meta or tensor.is_nested)
    if is_plain:
        return tensor
    if not _is_readable(tensor):
        return torch.empty(0)
    tensor = dense_values(tensor)
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.dtype in ORDINARY:
        return tensor
    # torch cannot even convert float4, and it has neither Inf nor NaN.
    if "float4" in str(tensor.dtype):
        return torch.empty(0)
    # No reduction takes float8.
    return tensor.float()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Widen half precision, whose squares leave its range at 256."""
    if tensor.dtype in HALVES:
        return tensor.float()
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or Inf. Exact, and read on the host: for the slow path only."""
    values = dense_real(tensor).detach()
    if not values.is_floating_point() or values.numel() == 0:
        return True
    # One pass without a mask: a finite sum proves it. Finite elements can overflow their sum.
    if math.isfinite(values.sum().item()):
        return True
    return bool(torch.isfinite(values).all())


def _is_readable(tensor: Tensor) -> bool:
    """False for lazy, meta, quantized, opaque and strided nested tensors."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    if tensor.is_nested and tensor.layout is torch.strided:
        return False
    return tensor.layout is not MKLDNN


# --- Words for dtypes and shapes, as messages, journals and checkpoints write them.


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` rather than `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def dtype_and_shape(tensor: Tensor) -> str:
    """Return for instance `float32 [3, 4]`."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


# --- Version marks: tell whether tensors were written to since a moment, without a copy or a
# sync.


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Mark the tensors as they are now."""
    return [tensor._version for tensor in tensors]


def written_since(tensors: Iterable[Tensor], marks: Sequence[int]) -> list[Tensor]:
    """Tensors that were written to since `marks` was taken."""
    return [t for t, mark in zip(tensors, marks, strict=True) if t._version != mark]
