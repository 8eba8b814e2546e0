"""The values of a piece of memory: finite or not, range, and what exactly is wrong if they are not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDENED = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Types that have no minimum of their own."""
PARTS = {"complex128": torch.float64, "complex64": torch.float32, "complex32": torch.float16}


@dataclass(frozen=True, slots=True)
class Values:
    """What was seen in one piece."""

    count: int
    low: float
    high: float
    nan: int = 0
    positive: int = 0
    negative: int = 0
    first: int | None = None


def view(memory: bytearray, offset: int, size: int, dtype: str) -> Tensor:
    """The bytes as numbers, without a copy; complex ones as pairs."""
    real = PARTS.get(dtype) or getattr(torch, dtype)
    return torch.frombuffer(memory, dtype=real, count=size // real.itemsize, offset=offset)


def look(values: Tensor, dtype: str) -> Values:
    """Exact for every value; the quick way is one pass, the slow one is taken only where something
    is not finite.
    """
    if dtype in WIDENED:
        values = values.to(torch.float32)
    low, high = (float(bound) for bound in torch.aminmax(values))
    count = values.numel() // (2 if dtype in PARTS else 1)
    if math.isfinite(low) and math.isfinite(high):
        return Values(count, low, high)
    return _closely(values, count, values.numel() // count)


class Extremes:
    """Least and greatest values of many pieces of one type, fetched together at the end.

    Each number that is fetched takes the interpreter's lock, for which the other threads wait.
    """

    def __init__(self, dtype: str, pieces: int) -> None:
        self._widen = dtype in WIDENED
        real = torch.float32 if self._widen else PARTS.get(dtype) or getattr(torch, dtype)
        self._low, self._high = torch.empty(2, pieces, dtype=real)
        self._places = list(zip(self._low.unbind(), self._high.unbind(), strict=True))

    def add(self, number: int, values: Tensor) -> None:
        torch.aminmax(values.to(torch.float32) if self._widen else values, out=self._places[number])

    def bounds(self) -> list[tuple[float, float]]:
        return list(
            zip(map(float, self._low.tolist()), map(float, self._high.tolist()), strict=True)
        )


def _closely(values: Tensor, count: int, parts: int) -> Values:
    bad = ~torch.isfinite(values)
    fine = values[~bad]
    low, high = (float(b) for b in torch.aminmax(fine)) if fine.numel() else (math.inf, -math.inf)
    return Values(
        count,
        low,
        high,
        nan=int(torch.isnan(values).sum()),
        positive=int(torch.isposinf(values).sum()),
        negative=int(torch.isneginf(values).sum()),
        first=int(bad.to(torch.uint8).argmax()) // parts,
    )


def squares(values: Tensor) -> float:
    """The sum of the squares of the finite values."""
    finite = torch.nan_to_num(values.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return float(torch.dot(finite, finite))
