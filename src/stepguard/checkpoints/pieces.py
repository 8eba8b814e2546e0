"""Tensors as a stream of flat byte pieces, and the exact finite test on them.

A piece is small enough for the cache, so writing, digest and finite test read memory once.
Everything here is numpy on purpose: it lets go of the interpreter lock and starts no threads of its
own, which torch would, against training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepguard.checkpoints.layout import REAL_PART, Form

PIECE = 1 << 19
"""Bytes of a piece: fits the second-level cache, and is long enough for what is done without the
interpreter lock.
"""

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
"""Without the sign, a number is not finite from this bit pattern on."""
_ONE_NAN = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
"""Formats without infinities whose only NaN is minus zero."""


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order; what is not contiguous is copied a piece at a time."""
    for flat in _flat_pieces(tensor.detach()):
        host = flat.cpu().resolve_conj().resolve_neg()
        if host.numel():
            yield host.view(torch.uint8).numpy().data


def _flat_pieces(tensor: Tensor) -> Iterator[Tensor]:
    most = max(PIECE // tensor.element_size(), 1)
    if tensor.numel() <= most:
        yield tensor.contiguous().view(-1)
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), most)
    elif (row := tensor[0].numel()) <= most:
        for rows in torch.split(tensor, most // row):
            yield from _flat_pieces(rows)
    else:
        for part in tensor.unbind(0):
            yield from _flat_pieces(part)


def nonfinite(piece: memoryview, dtype: torch.dtype) -> int:
    """How many elements of the piece are NaN or infinite, by their bits: exact for every float
    format.
    """
    dtype = REAL_PART.get(dtype, dtype)
    if dtype not in _EXPONENTS and dtype not in _ONE_NAN:
        return 0
    bits = np.frombuffer(piece, dtype=_INTEGERS[dtype.itemsize])
    if dtype in _ONE_NAN:
        return int(np.count_nonzero(bits == _ONE_NAN[dtype]))
    mask, first = _EXPONENTS[dtype]
    magnitude = np.bitwise_and(bits, bits.dtype.type(mask))
    return 0 if magnitude.max() < first else int(np.count_nonzero(magnitude >= first))


def empty_of(form: Form) -> tuple[Tensor, memoryview]:
    """A new tensor and its bytes, to be read into."""
    tensor = torch.empty(form.shape, dtype=form.dtype)
    if not tensor.numel():
        return tensor, memoryview(bytearray())
    return tensor, tensor.view(-1).view(torch.uint8).numpy().data
