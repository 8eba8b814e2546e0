"""Tensors that are not what most code takes for granted: without a shape yet, without data, of
other layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepguard.tensors.values import is_lazy


def why_not_kept(tensor: Tensor) -> str:
    """What keeps this tensor from being copied into a snapshot or a file, in words; empty for an
    ordinary one.
    """
    if is_lazy(tensor):
        return "has no shape before the model is called for the first time"
    if tensor.is_meta:
        return "is on the meta device and has no data"
    if tensor.is_nested:
        return "is a nested tensor; only dense ones can be kept"
    if tensor.layout is not torch.strided:
        return f"is a {tensor.layout} tensor; only dense ones can be kept"
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}); only plain ones can be kept"
    return ""
