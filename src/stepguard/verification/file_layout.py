"""What a format reader says about one file: tensors, checksums, and what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from stepguard.records.verification import Rate, Role
from stepguard.verification import dtype_names
from stepguard.verification.damage import ProblemList
from stepguard.verification.pickle_contents import PickleContents


@dataclass(slots=True, eq=False)
class Statistics:
    """Statistics of the values read so far; `low` and `high` are those of the finite ones."""

    count: int = 0
    nan: int = 0
    positive: int = 0
    """How many are +Inf."""
    negative: int = 0
    """How many are -Inf."""
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
    def any_finite(self) -> bool:
        return self.low <= self.high

    @property
    def largest(self) -> float:
        """Return the largest magnitude of the finite values."""
        if not self.any_finite:
            return 0.0
        return max(abs(self.low), abs(self.high))


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes of one element type that are read once, however many tensors share them."""

    start: int
    size: int
    dtype: str
    base: int
    """From where elements are counted: the start of the storage, so that cuts never split one."""
    seen: Statistics = field(default_factory=Statistics)


@dataclass(slots=True, eq=False)
class StoredTensor:
    """One tensor of a file, and the segment that holds its values."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    segment: Segment | None = None
    """None for integers and empty tensors: they cannot be NaN or infinite."""
    start: int = 0
    size: int = 0

    @property
    def seen(self) -> Statistics | None:
        """Return the statistics of its values; None where no value was read."""
        if self.segment is None or not self.segment.seen.count:
            return None
        return self.segment.seen


@dataclass(slots=True, eq=False)
class ChecksumRange:
    """A range of the file with the checksum that was stored for it."""

    start: int
    size: int
    label: str
    algorithm: str
    """`crc32` or `xxh3_128`."""
    expected: int | str
    tensor: str | None = None


@dataclass(slots=True)
class FileLayout:
    """One file: parsed by its format reader, then filled with statistics by the scan."""

    path: Path
    format: str
    size: int
    problems: ProblemList
    tensors: list[StoredTensor] = field(default_factory=list)
    checksums: list[ChecksumRange] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    step: int | None = None
    numbers: list[tuple[str, Role, float]] = field(default_factory=list)
    """Python floats that are NaN or infinite."""
    complete: bool = False
    """The reader reached the end of the file, so a tensor that is not listed is not in it."""

    def add_tensor(
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
        tensor = StoredTensor(name, role, dtype, shape, start=start, size=size)
        if size and dtype_names.is_real(dtype):
            tensor.segment = Segment(start, size, dtype, base)
        self.tensors.append(tensor)

    def add_contents(self, contents: PickleContents) -> None:
        """Add learning rates, step and non-finite numbers of a pickle."""
        self.numbers.extend(contents.numbers)
        for name, kind, value in contents.rates:
            self.rates.append(Rate(file=self.problems.file, name=name, kind=kind, value=value))
        if self.step is None:
            self.step = contents.step
