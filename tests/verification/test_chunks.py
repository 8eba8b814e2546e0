"""Cutting a file into chunks: every wanted byte exactly once, no element split, checksums combined
rightly.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepguard.verification.bounded_file import SIZES
from stepguard.verification.reading import ChecksumRange, Segment, StoredTensor, cut, merge


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Segment], list[ChecksumRange]]:
    segments, blocks, position = [], [], draw(st.integers(0, 50))
    for _ in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(["float32", "float16", "float64", "complex128"]))
        width = SIZES[dtype]
        elements = draw(st.integers(1, 200))
        base = position
        for _ in range(draw(st.integers(0, 3))):
            first = draw(st.integers(0, elements - 1))
            last = draw(st.integers(first + 1, elements))
            segments.append(Segment(base + first * width, (last - first) * width, dtype, base))
        if draw(st.booleans()):
            blocks.append(ChecksumRange(base, elements * width, "x", "crc32", 0))
        position = base + elements * width + draw(st.integers(0, 70_000))
    return sorted(segments, key=lambda segment: segment.start), blocks


@given(layouts(), st.integers(64, 5000), st.integers(1, 4))
def test_every_wanted_byte_comes_once_and_no_element_is_split(
    layout: tuple[list[Segment], list[ChecksumRange]], piece: int, times: int
) -> None:
    segments, blocks = layout
    seen: dict[int, int] = {}
    end = 0
    for chunk in cut(segments, blocks, piece, piece * times):
        assert 0 < chunk.size <= piece * times and chunk.start >= end
        assert chunk.size <= piece or all(
            (part.offset, part.size) == (0, chunk.size) for part in chunk.parts
        )
        end = chunk.start + chunk.size
        for part in chunk.parts:
            owner = part.owner
            assert part.size > 0 and part.offset >= 0 and part.offset + part.size <= chunk.size
            assert chunk.start + part.offset == owner.start + seen.get(id(owner), 0)
            seen[id(owner)] = seen.get(id(owner), 0) + part.size
            if isinstance(owner, Segment):
                assert part.size % SIZES[owner.dtype] == 0
    owners: list[Any] = [*segments, *blocks]
    assert seen == {id(owner): owner.size for owner in owners}


def test_same_bytes_are_one_segment() -> None:
    looks = [
        StoredTensor(name, "parameter", "float32", (4,), Segment(64, 16, "float32", 64))
        for name in "abc"
    ]
    assert len(merge(looks)) == 1
    assert len({id(look.segment) for look in looks}) == 1


def test_views_that_overlap_without_end_are_looked_at_together() -> None:
    looks = [
        StoredTensor(
            str(n),
            "parameter",
            "float32",
            (1000 - n,),
            Segment(n * 4, 4 * (1000 - n), "float32", 0),
        )
        for n in range(900)
    ]
    (segment,) = merge(looks)
    assert (segment.start, segment.size) == (0, 4000)
    assert all(look.segment is segment for look in looks)
