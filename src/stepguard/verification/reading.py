"""Cut a file into chunks that are read once, each with the tensors and checksums it is part of."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from stepguard.records.checks import Rate, Role
from stepguard.verification import bounded_file
from stepguard.verification.bounded_file import (
    SIZES,
    Damaged,
    FileSlice,
    PieceStatistics,
    ProblemList,
)
from stepguard.verification.pickle_machine import PickleContents

# --- What a format reader says about one file: tensors, checksums, and what is wrong with it.


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
        if size and bounded_file.is_real(dtype):
            tensor.segment = Segment(start, size, dtype, base)
        self.tensors.append(tensor)

    def add_contents(self, contents: PickleContents) -> None:
        """Add learning rates, step and non-finite numbers of a pickle."""
        self.numbers.extend(contents.numbers)
        for name, kind, value in contents.rates:
            self.rates.append(Rate(file=self.problems.file, name=name, kind=kind, value=value))
        if self.step is None:
            self.step = contents.step


# --- Cut a file into chunks that are read once, each with the tensors and checksums it is part
# of.


GAP = 1 << 16
"""Unwanted bytes are read along if they are fewer than this: one long read beats two short ones."""
ALIGNMENT = 16
"""The widest element: cuts lie at multiples of it from the start of a storage."""
OVERLAP = 4
"""How many times the bytes of a storage may be read for tensors that share it in different ways."""


@dataclass(slots=True)
class ChunkPart:
    """Bytes of a chunk that belong to one segment or checksum; `offset` counts in the chunk."""

    owner: Segment | ChecksumRange
    offset: int
    size: int


@dataclass(slots=True)
class Chunk:
    """A range of the file that is read at once."""

    start: int
    size: int
    parts: list[ChunkPart] = field(default_factory=list)


@dataclass(slots=True)
class _Cluster:
    """Segments that share bytes."""

    start: int
    stop: int
    base: int
    segments: list[Segment]


def merge(tensors: Sequence[StoredTensor]) -> list[Segment]:
    """Return the segments to read, in the order of the file, and point the tensors to them.

    Tensors over the same bytes share one segment; where views overlap too often, all of them do.
    """
    with_values = [tensor for tensor in tensors if tensor.segment is not None]
    same: dict[tuple[int, int, str], Segment] = {}
    for tensor in with_values:
        assert tensor.segment is not None
        key = (tensor.segment.start, tensor.segment.size, tensor.segment.dtype)
        tensor.segment = same.setdefault(key, tensor.segment)
    joined = _joined(sorted(same.values(), key=lambda segment: (segment.start, -segment.size)))
    used: set[Segment] = set()
    for tensor in with_values:
        assert tensor.segment is not None
        tensor.segment = joined.get(tensor.segment, tensor.segment)
        used.add(tensor.segment)
    return sorted(used, key=lambda segment: segment.start)


def _joined(segments: Sequence[Segment]) -> dict[Segment, Segment]:
    """Map the segments of every cluster that overlaps too often to one segment over all of them."""
    joined: dict[Segment, Segment] = {}
    for cluster in _clusters(segments):
        width = cluster.stop - cluster.start
        # a hostile file can declare a million views of one storage: reading must stay linear
        if sum(segment.size for segment in cluster.segments) > OVERLAP * width:
            everything = Segment(cluster.start, width, cluster.segments[0].dtype, cluster.base)
            for segment in cluster.segments:
                joined[segment] = everything
    return joined


def _clusters(segments: Sequence[Segment]) -> Iterator[_Cluster]:
    """Group overlapping segments, in the order of the file."""
    group: _Cluster | None = None
    for segment in segments:
        stop = segment.start + segment.size
        if group is not None and segment.start < group.stop:
            group.segments.append(segment)
            group.stop = max(group.stop, stop)
            continue
        if group is not None:
            yield group
        group = _Cluster(segment.start, stop, segment.base, [segment])
    if group is not None:
        yield group


def cut(
    segments: Sequence[Segment], checksums: Sequence[ChecksumRange], piece: int, chunk: int
) -> Iterator[Chunk]:
    """Yield chunks in the order of the file; no cut splits an element.

    A chunk is at most a piece long, or, where nothing begins or ends inside it, as long as `chunk`
    allows: then it can be processed piece by piece.
    """
    return _Cutter(segments, checksums).chunks(piece, chunk)


class _Cutter:
    """Walks over the file with the owners that the present position lies in."""

    def __init__(self, segments: Sequence[Segment], checksums: Sequence[ChecksumRange]) -> None:
        self._clusters = list(_clusters(segments))
        self._cluster_ends = [cluster.stop for cluster in self._clusters]
        owners: list[Segment | ChecksumRange] = [*segments, *checksums]
        self._owners = [owner for owner in owners if owner.size]
        self._owners.sort(key=lambda owner: owner.start)
        self._following = 0
        """Index of the first owner that begins behind the present position."""
        self._active: list[Segment | ChecksumRange] = []

    def chunks(self, piece: int, chunk: int) -> Iterator[Chunk]:
        position = 0
        while self._active or self._next_start() is not None:
            if not self._active:
                position = max(position, self._owners[self._following].start)
            stop = min(self._next_border(), position + chunk)
            if stop - position <= piece:
                stop = self._without_gap(position + piece)
            stop = self._aligned(stop)
            self._begin_owners_before(stop)
            parts = [_part(owner, position, stop) for owner in self._active]
            yield Chunk(position, stop - position, parts)
            self._active = [owner for owner in self._active if owner.start + owner.size > stop]
            position = stop

    def _next_start(self) -> int | None:
        if self._following < len(self._owners):
            return self._owners[self._following].start
        return None

    def _next_border(self) -> int:
        """Return up to where nothing begins or ends."""
        if not self._active:
            return 0
        stop = min(owner.start + owner.size for owner in self._active)
        start = self._next_start()
        return stop if start is None else min(stop, start)

    def _without_gap(self, most: int) -> int:
        """Return how far to read: over everything that follows without a gap worth skipping."""
        stop = max((owner.start + owner.size for owner in self._active), default=0)
        for index in range(self._following, len(self._owners)):
            owner = self._owners[index]
            if stop >= most or (stop and owner.start > stop + GAP):
                break
            stop = max(stop, owner.start + owner.size)
        return min(stop, most)

    def _aligned(self, stop: int) -> int:
        """Move a cut that lies inside a storage to the border of an element."""
        inside = bisect_right(self._cluster_ends, stop)
        if inside < len(self._clusters) and self._clusters[inside].start < stop:
            base = self._clusters[inside].base
            return base + (stop - base) // ALIGNMENT * ALIGNMENT
        return stop

    def _begin_owners_before(self, stop: int) -> None:
        start = self._next_start()
        while start is not None and start < stop:
            self._active.append(self._owners[self._following])
            self._following += 1
            start = self._next_start()


def _part(owner: Segment | ChecksumRange, position: int, stop: int) -> ChunkPart:
    first = max(owner.start, position)
    last = min(owner.start + owner.size, stop)
    return ChunkPart(owner, first - position, last - first)


# --- Read one chunk of a file piece by piece: statistics of its values, and its checksums.


PIECE = 1 << 19
"""Small enough to stay in the cache of the processor between reading and measuring."""
CHUNK = 16 << 20


@dataclass(slots=True)
class ChunkResult:
    """What was measured in a chunk."""

    chunk: Chunk
    values: list[tuple[Segment, int, PieceStatistics]] = field(default_factory=list)
    """Segment, offset of the piece in it, and the statistics of the piece."""
    crcs: list[tuple[ChunkPart, int]] = field(default_factory=list)


def read_chunks(source: FileSlice, chunks: Sequence[Chunk]) -> list[ChunkResult]:
    """Read a few chunks in one thread, with one small buffer."""
    # torch.frombuffer needs memory that can be written to, so bytes would not do
    buffer = bytearray(PIECE)
    results = []
    for chunk in chunks:
        if chunk.size > PIECE:
            results.append(_read_long(source, chunk, buffer))
        else:
            results.append(_read_short(source, chunk, buffer))
    return results


def _read_short(source: FileSlice, chunk: Chunk, buffer: bytearray) -> ChunkResult:
    """Read a chunk of one piece, with parts anywhere in it."""
    result = ChunkResult(chunk)
    view = memoryview(buffer)
    fill(source, view[: chunk.size], chunk.start)
    known: dict[tuple[int, int, str], PieceStatistics] = {}
    for part in chunk.parts:
        owner = part.owner
        if isinstance(owner, Segment):
            key = (part.offset, part.size, owner.dtype)
            # overlapping views may have the same part
            if key not in known:
                values = bounded_file.as_tensor(buffer, *key)
                known[key] = bounded_file.statistics_of(values, owner.dtype)
            result.values.append((owner, chunk.start + part.offset - owner.start, known[key]))
        elif owner.algorithm == "crc32":
            result.crcs.append(
                (part, bounded_file.crc32(view[part.offset : part.offset + part.size]))
            )
    return result


def _read_long(source: FileSlice, chunk: Chunk, buffer: bytearray) -> ChunkResult:
    """Read a chunk of several pieces; every part covers all of it."""
    result = ChunkResult(chunk)
    segments: list[Segment] = []
    summed: list[ChunkPart] = []
    for part in chunk.parts:
        if isinstance(part.owner, Segment):
            segments.append(part.owner)
        elif part.owner.algorithm == "crc32":
            summed.append(part)
    dtypes = {segment.dtype for segment in segments}
    extremes, total = _first_pass(source, chunk, buffer, dtypes, with_crc=bool(summed))
    result.crcs = [(part, total) for part in summed]
    for dtype in dtypes:
        measured = _second_pass(source, chunk, extremes[dtype].bounds(), dtype, buffer)
        for segment in segments:
            if segment.dtype == dtype:
                for offset, values in measured:
                    result.values.append((segment, chunk.start + offset - segment.start, values))
    return result


def _first_pass(
    source: FileSlice, chunk: Chunk, buffer: bytearray, dtypes: set[str], *, with_crc: bool
) -> tuple[dict[str, bounded_file.Extremes], int]:
    """Read every piece once: its extremes by element type, and the CRC of the chunk."""
    view = memoryview(buffer)
    cuts = list(pieces(chunk))
    extremes = {dtype: bounded_file.Extremes(dtype, len(cuts)) for dtype in dtypes}
    views: dict[tuple[int, str], Tensor] = {}
    total = 0
    for number, (start, size) in enumerate(cuts):
        fill(source, view[:size], chunk.start + start)
        for dtype in dtypes:
            # all pieces but the last have one size, and share the buffer
            if (size, dtype) not in views:
                views[size, dtype] = bounded_file.as_tensor(buffer, 0, size, dtype)
            extremes[dtype].add(number, views[size, dtype])
        if with_crc:
            total = bounded_file.crc32(view[:size], total)
    return extremes, total


def _second_pass(
    source: FileSlice,
    chunk: Chunk,
    bounds: Sequence[tuple[float, float]],
    dtype: str,
    buffer: bytearray,
) -> list[tuple[int, PieceStatistics]]:
    """Merge the finite pieces into one; a piece with NaN or Inf is read again and counted."""
    measured: list[tuple[int, PieceStatistics]] = []
    elements = 0
    least = math.inf
    greatest = -math.inf
    for (start, size), (low, high) in zip(pieces(chunk), bounds, strict=True):
        if math.isfinite(low) and math.isfinite(high):
            elements += size // SIZES[dtype]
            least = min(least, low)
            greatest = max(greatest, high)
        else:
            fill(source, memoryview(buffer)[:size], chunk.start + start)
            values = bounded_file.as_tensor(buffer, 0, size, dtype)
            measured.append((start, bounded_file.statistics_of(values, dtype)))
    if elements:
        measured.append((0, PieceStatistics(elements, least, greatest)))
    return measured


def pieces(chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield offset and size of every piece of the chunk."""
    for start in range(0, chunk.size, PIECE):
        yield start, min(PIECE, chunk.size - start)


def fill(source: FileSlice, view: memoryview, position: int) -> None:
    """Read exactly as much as the view holds; Damaged if the file became shorter meanwhile."""
    filled = 0
    while filled < len(view):
        try:
            # preadv releases the interpreter lock and fills the buffer without an allocation
            count = os.preadv(source.descriptor, [view[filled:]], position + filled)
        except OSError as error:
            raise Damaged(
                "unreadable", f"cannot be read at byte {position:,}: {error.strerror}"
            ) from error
        if not count:
            raise Damaged(
                "torn", f"ends at byte {position + filled:,}: it became shorter while it was read"
            )
        filled += count
