"""Statistics of the values in a piece of memory: range, and counts of NaN and infinities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDENED = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Types for which torch has no aminmax; they are converted to float32."""
PARTS = {"complex128": torch.float64, "complex64": torch.float32, "complex32": torch.float16}
"""Complex numbers are read as pairs of these."""


@dataclass(frozen=True, slots=True)
class PieceStatistics:
    """Statistics of one piece; `low` and `high` are those of the finite values."""

    count: int
    low: float
    high: float
    nan: int = 0
    positive: int = 0
    negative: int = 0
    first: int | None = None
    """Element number in the piece of the first value that is not finite."""


def as_tensor(memory: bytearray, offset: int, size: int, dtype: str) -> Tensor:
    """View bytes as numbers, without a copy; complex ones as pairs."""
    real = _real_type(dtype)
    return torch.frombuffer(memory, dtype=real, count=size // real.itemsize, offset=offset)


def statistics_of(values: Tensor, dtype: str) -> PieceStatistics:
    """Measure every value: in one pass, or in several where something is not finite."""
    if dtype in WIDENED:
        values = values.to(torch.float32)
    # aminmax returns NaN if any value is NaN, so finite bounds prove that all values are finite
    low, high = (float(bound) for bound in torch.aminmax(values))
    parts = 2 if dtype in PARTS else 1
    count = values.numel() // parts
    if math.isfinite(low) and math.isfinite(high):
        return PieceStatistics(count, low, high)
    return _with_bad_values(values, count, parts)


class Extremes:
    """Least and greatest values of many pieces of one type, fetched together at the end.

    Fetching a number takes the interpreter lock, for which the other threads wait.
    """

    def __init__(self, dtype: str, pieces: int) -> None:
        self._widen = dtype in WIDENED
        real = torch.float32 if self._widen else _real_type(dtype)
        self._low, self._high = torch.empty(2, pieces, dtype=real)
        self._outputs = list(zip(self._low.unbind(), self._high.unbind(), strict=True))

    def add(self, number: int, values: Tensor) -> None:
        if self._widen:
            values = values.to(torch.float32)
        # with out= the result stays in memory and nothing waits for it
        torch.aminmax(values, out=self._outputs[number])

    def bounds(self) -> list[tuple[float, float]]:
        low = map(float, self._low.tolist())
        high = map(float, self._high.tolist())
        return list(zip(low, high, strict=True))


def squares(values: Tensor) -> float:
    """Return the sum of the squares of the finite values."""
    finite = torch.nan_to_num(values.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return float(torch.dot(finite, finite))


def _real_type(dtype: str) -> torch.dtype:
    real: torch.dtype = PARTS.get(dtype) or getattr(torch, dtype)
    return real


def _with_bad_values(values: Tensor, count: int, parts: int) -> PieceStatistics:
    bad = ~torch.isfinite(values)
    finite = values[~bad]
    low = math.inf
    high = -math.inf
    if finite.numel():
        low, high = (float(bound) for bound in torch.aminmax(finite))
    return PieceStatistics(
        count,
        low,
        high,
        nan=int(torch.isnan(values).sum()),
        positive=int(torch.isposinf(values).sum()),
        negative=int(torch.isneginf(values).sum()),
        # argmax is not defined for bool
        first=int(bad.to(torch.uint8).argmax()) // parts,
    )
