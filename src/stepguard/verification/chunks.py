"""Cuts a file into chunks that are read once: which checksums and which tensors each chunk is part
of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stepguard.verification.file_layout import Block, Look, Segment

GAP = 1 << 16
"""Bytes nobody asked for are read along if they are fewer than this."""
STEP = 16
"""The widest element: cuts lie at multiples of it from the start of a storage."""
OVERLAP = 4
"""How many times the bytes of a storage may be looked at for tensors that share it in different
ways.
"""


@dataclass(slots=True)
class Part:
    """Bytes of a chunk that belong to one segment or block: from `offset` in the chunk, `size`
    long.
    """

    owner: Segment | Block
    offset: int
    size: int


@dataclass(slots=True)
class Chunk:
    """A range of the file that is read at once."""

    start: int
    size: int
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True)
class _Cluster:
    """Segments that share bytes."""

    start: int
    stop: int
    base: int
    segments: list[Segment]


def merge(looks: Sequence[Look]) -> list[Segment]:
    """One segment for all tensors that are the same bytes; one for all if they overlap too often."""
    same: dict[tuple[int, int, str], Segment] = {}
    for look in looks:
        if look.segment is not None:
            key = look.segment.start, look.segment.size, look.segment.dtype
            look.segment = same.setdefault(key, look.segment)
    joined: dict[Segment, Segment] = {}
    for cluster in _clusters(
        sorted(same.values(), key=lambda segment: (segment.start, -segment.size))
    ):
        width = cluster.stop - cluster.start
        if sum(segment.size for segment in cluster.segments) > OVERLAP * width:
            whole = Segment(cluster.start, width, cluster.segments[0].dtype, cluster.base)
            joined.update((segment, whole) for segment in cluster.segments)
    for look in looks:
        if look.segment is not None:
            look.segment = joined.get(look.segment, look.segment)
    return sorted(
        {look.segment for look in looks if look.segment is not None},
        key=lambda segment: segment.start,
    )


def _clusters(segments: Sequence[Segment]) -> Iterator[_Cluster]:
    """Groups of overlapping segments, in the order of the file."""
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
    segments: Sequence[Segment], blocks: Sequence[Block], piece: int, chunk: int
) -> Iterator[Chunk]:
    """Chunks in the order of the file; no cut splits an element.

    A chunk is at most a piece long, or, where nothing begins or ends inside it, as long as `chunk`
    allows: then it can be worked on piece by piece.
    """
    clusters = list(_clusters(segments))
    ends = [cluster.stop for cluster in clusters]
    wanted: list[Segment | Block] = [*segments, *blocks]
    owners = sorted((owner for owner in wanted if owner.size), key=lambda owner: owner.start)
    active: list[Segment | Block] = []
    position, following = 0, 0
    while following < len(owners) or active:
        if not active:
            position = max(position, owners[following].start)
        stop = min(_even(owners, following, active), position + chunk)
        if stop - position <= piece:
            stop = _reach(owners, following, active, position + piece)
        inside = bisect_right(ends, stop)
        if inside < len(clusters) and clusters[inside].start < stop:
            base = clusters[inside].base
            stop = base + (stop - base) // STEP * STEP
        while following < len(owners) and owners[following].start < stop:
            active.append(owners[following])
            following += 1
        yield Chunk(position, stop - position, [_part(owner, position, stop) for owner in active])
        active = [owner for owner in active if owner.start + owner.size > stop]
        position = stop


def _part(owner: Segment | Block, position: int, stop: int) -> Part:
    first, last = max(owner.start, position), min(owner.start + owner.size, stop)
    return Part(owner, first - position, last - first)


def _even(
    owners: Sequence[Segment | Block], following: int, active: Sequence[Segment | Block]
) -> int:
    """Up to where nothing begins or ends."""
    if not active:
        return 0
    stop = min(owner.start + owner.size for owner in active)
    return min(stop, owners[following].start) if following < len(owners) else stop


def _reach(
    owners: Sequence[Segment | Block], following: int, active: Sequence[Segment | Block], most: int
) -> int:
    """How far to read: over everything that follows without a gap worth skipping."""
    stop = max((owner.start + owner.size for owner in active), default=0)
    while (
        stop < most
        and following < len(owners)
        and (not stop or owners[following].start <= stop + GAP)
    ):
        stop = max(stop, owners[following].start + owners[following].size)
        following += 1
    return min(stop, most)
