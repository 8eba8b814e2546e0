"""Words for dtypes and shapes, as messages, journals and checkpoints write them."""

from __future__ import annotations

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` rather than `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def dtype_and_shape(tensor: Tensor) -> str:
    """Return for instance `float32 [3, 4]`."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
