"""What a format reader says about one file: where its tensors lie, which ranges carry a checksum,
what is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from stepguard.records.verification import Rate, Role
from stepguard.verification import dtype_names
from stepguard.verification.damage import Notes
from stepguard.verification.pickle_contents import Contents


@dataclass(slots=True, eq=False)
class Statistics:
    """Of the values seen so far; `low` and `high` are those of the finite ones."""

    count: int = 0
    nan: int = 0
    positive: int = 0
    negative: int = 0
    low: float = math.inf
    high: float = -math.inf
    squares: float = 0.0
    """Sum of the squares of the finite values; 0 where it was not needed."""
    first: int | None = None
    """Element number of the first value that is not finite."""

    @property
    def bad(self) -> int:
        return self.nan + self.positive + self.negative

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes of one element type that are scanned once, whatever number of tensors they belong to."""

    start: int
    size: int
    dtype: str
    base: int
    """From where elements are counted: the start of the storage, so that cuts never split one."""
    seen: Statistics = field(default_factory=Statistics)


@dataclass(slots=True, eq=False)
class Look:
    """One tensor, and the segment that shows its values."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    segment: Segment | None = None
    start: int = 0
    size: int = 0


@dataclass(slots=True, eq=False)
class Block:
    """A range of the file with a checksum over it."""

    start: int
    size: int
    label: str
    algorithm: str
    """`crc32` or `xxh3_128`."""
    expected: int | str
    tensor: str | None = None


@dataclass(slots=True)
class Layout:
    """One file, understood but not yet scanned."""

    path: Path
    format: str
    size: int
    notes: Notes
    looks: list[Look] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    step: int | None = None
    numbers: list[tuple[str, Role, float]] = field(default_factory=list)
    """Python floats that are NaN or infinite."""
    whole: bool = False
    """The reader came to the end, so that what is not listed is not there."""

    def look(
        self,
        name: str,
        role: Role,
        dtype: str,
        shape: tuple[int, ...],
        start: int,
        base: int,
        size: int,
    ) -> None:
        """Add a tensor whose `size` bytes begin at `start` of the file."""
        segment = Segment(start, size, dtype, base) if dtype_names.is_real(dtype) and size else None
        self.looks.append(Look(name, role, dtype, shape, segment, start, size))

    def take(self, contents: Contents) -> None:
        """Rates, step and odd numbers of a pickle's contents."""
        self.numbers.extend(contents.numbers)
        found = [
            Rate(file=self.notes.file, name=name, kind=kind, value=v)
            for name, kind, v in contents.rates
        ]
        self.rates.extend(found)
        self.step = self.step if self.step is not None else contents.step


def elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
