"""Combine CRC-32s of parts into that of the whole, so that threads can compute parts at once.

A CRC is linear over bits: appending zero bytes multiplies it by a fixed 32x32 matrix of bits.
"""

from __future__ import annotations

from functools import lru_cache

try:
    # the same function as zlib's, three times as fast
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["combine", "crc32"]

POLYNOMIAL = 0xEDB88320
"""Of CRC-32, bits reversed."""
Matrix = tuple[int, ...]
"""32 columns: what each bit of a CRC turns into."""


def combine(first: int, second: int, size: int) -> int:
    """Return the CRC of `a + b` from the CRCs of `a` and of `b`, which is `size` bytes long."""
    if not size:
        return first
    return _apply(_zeros(size), first) ^ second


def _apply(matrix: Matrix, vector: int) -> int:
    total = 0
    column = 0
    while vector:
        if vector & 1:
            total ^= matrix[column]
        vector >>= 1
        column += 1
    return total


def _times(left: Matrix, right: Matrix) -> Matrix:
    return tuple(_apply(left, column) for column in right)


@lru_cache(maxsize=256)
def _zeros(size: int) -> Matrix:
    """Return the effect of `size` zero bytes on a CRC, by repeated squaring."""
    result: Matrix | None = None
    power = _one_zero_byte()
    while size:
        if size & 1:
            result = power if result is None else _times(power, result)
        size >>= 1
        if size:
            power = _squared(power)
    assert result is not None
    return result


@lru_cache(maxsize=64)
def _squared(matrix: Matrix) -> Matrix:
    return _times(matrix, matrix)


@lru_cache(maxsize=1)
def _one_zero_byte() -> Matrix:
    bit: Matrix = (POLYNOMIAL, *(1 << n for n in range(31)))
    # one bit, squared three times: eight bits
    for _ in range(3):
        bit = _times(bit, bit)
    return bit
