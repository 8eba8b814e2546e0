"""Cut a file into chunks that are read once, each with the tensors and checksums it is part of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stepguard.verification.file_layout import ChecksumRange, Segment, StoredTensor

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
