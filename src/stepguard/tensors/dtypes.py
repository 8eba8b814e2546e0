"""Names of dtypes."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` rather than `torch.float16`."""
    return str(dtype).removeprefix("torch.")
