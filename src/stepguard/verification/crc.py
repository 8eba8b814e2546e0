"""CRC-32 of a whole from the CRCs of its parts, so that parts can be computed at the same time."""

from __future__ import annotations

from functools import lru_cache

try:  # three times as fast; the same function where it is not installed
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["combine", "crc32"]

POLYNOMIAL = 0xEDB88320
Matrix = tuple[int, ...]
"""32 columns: what each bit of a CRC turns into."""


def combine(first: int, second: int, size: int) -> int:
    """The CRC of `a + b` from the CRCs of `a` and of `b`, which is `size` bytes long."""
    return _apply(_zeros(size), first) ^ second if size else first


def _apply(matrix: Matrix, vector: int) -> int:
    total, column = 0, 0
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
    """The effect of `size` zero bytes on a CRC."""
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
    for _ in range(3):
        bit = _times(bit, bit)
    return bit
