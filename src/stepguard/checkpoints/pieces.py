"""Tensors as a stream of flat byte pieces, and the exact finite test on them.

A piece fits into the cache, so writing, digest and finite test read memory once. The test is in
numpy because that releases the interpreter lock and starts no threads, which torch's would compete
with training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepguard.checkpoints.file_plan import REAL_PART, TensorForm

PIECE = 1 << 19
"""Bytes of a piece: fits the second-level cache, and is worth releasing the interpreter lock."""

_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_EXPONENTS: dict[torch.dtype, tuple[int, int]] = {
    torch.float16: (0x7FFF, 0x7C00),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float32: (0x7FFF_FFFF, 0x7F80_0000),
    torch.float64: (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float8_e5m2: (0x7F, 0x7C),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
"""Mask of all bits but the sign, and the pattern from which on a number is not finite."""
_ONE_NAN = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
"""Formats without infinities whose only NaN is minus zero."""


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order; strided ones are copied piece by piece."""
    for flat in _flat_pieces(tensor.detach()):
        # conj() only sets a flag, and so does .imag of a conjugate: the memory holds other values
        host = flat.cpu().resolve_conj().resolve_neg()
        if host.numel():
            yield host.view(torch.uint8).numpy().data


def _flat_pieces(tensor: Tensor) -> Iterator[Tensor]:
    most = max(PIECE // tensor.element_size(), 1)
    if tensor.numel() <= most:
        yield tensor.contiguous().view(-1)
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), most)
    else:
        rows = max(most // tensor[0].numel(), 1)
        for part in torch.split(tensor, rows):
            # a single row is split along its own dimensions
            yield from _flat_pieces(part if rows > 1 else part[0])


def nonfinite(piece: memoryview, dtype: torch.dtype) -> int:
    """Count the elements that are NaN or infinite, by their bits: exact for every float format."""
    dtype = REAL_PART.get(dtype, dtype)
    if dtype not in _EXPONENTS and dtype not in _ONE_NAN:
        return 0
    bits = np.frombuffer(piece, dtype=_INTEGERS[dtype.itemsize])
    if dtype in _ONE_NAN:
        return int(np.count_nonzero(bits == _ONE_NAN[dtype]))
    mask, first = _EXPONENTS[dtype]
    magnitude = np.bitwise_and(bits, bits.dtype.type(mask))
    # max() is faster than a comparison, and nearly always enough
    if magnitude.max() < first:
        return 0
    return int(np.count_nonzero(magnitude >= first))


def empty_tensor(form: TensorForm) -> tuple[Tensor, memoryview]:
    """Return a new tensor and its bytes, to be read into."""
    tensor = torch.empty(form.shape, dtype=form.dtype)
    if not tensor.numel():
        return tensor, memoryview(bytearray())
    return tensor, tensor.view(-1).view(torch.uint8).numpy().data
