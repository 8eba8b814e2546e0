"""Version marks: tell whether tensors were written to since a moment, without a copy or a sync.

torch counts the in-place writes of every tensor in `_version`; views share the counter. Writes
through `.data` are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Mark the tensors as they are now."""
    return [tensor._version for tensor in tensors]


def written_since(tensors: Iterable[Tensor], marks: Sequence[int]) -> list[Tensor]:
    """Those of the tensors that were written to since `marks` was taken of them."""
    return [t for t, mark in zip(tensors, marks, strict=True) if t._version != mark]
