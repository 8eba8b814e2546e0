"""Read a file once with a few threads: the values of every tensor, and every checksum."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import xxhash

from stepguard.verification import crc, tensor_stats
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.chunk_reading import (
    CHUNK,
    PIECE,
    ChunkResult,
    fill,
    pieces,
    read_chunks,
)
from stepguard.verification.chunks import Chunk, cut, merge
from stepguard.verification.dtype_names import SIZES
from stepguard.verification.file_layout import ChecksumRange, FileLayout, Segment
from stepguard.verification.tensor_stats import PieceStatistics
from stepguard.verification.value_rules import wants_squares

WORKERS = min(4, os.cpu_count() or 1)
SMALL = 4 << 20
"""Files up to this size are not worth a thread."""
Advance = Callable[[int], None]
Sums = dict[ChecksumRange, str]


def scan(source: FileSlice, layout: FileLayout, advance: Advance) -> None:
    """Fill the statistics of every tensor, and report every checksum that does not match."""
    segments = merge(layout.tensors)
    summed = [each for each in layout.checksums if each.algorithm == "crc32"]
    hashed = [each for each in layout.checksums if each.algorithm != "crc32"]
    chunks = cut(segments, summed, PIECE, CHUNK)
    if source.size <= SMALL or WORKERS == 1:
        sums = _hashes(source, hashed)
        sums |= _collect((read_chunks(source, [chunk]) for chunk in chunks), advance)
    else:
        with _thread_pool() as pool:
            hashing = pool.submit(_hashes, source, hashed)
            sums = _collect(_read_in_order(pool, source, chunks), advance)
            sums |= hashing.result()
    _compare(layout, sums)
    _measure_outliers(source, layout)


@contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
    # four workers with torch's own threads in each would compete for the same cores
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(WORKERS, "stepguard-verify", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        # a part of what the workers set (MKL) counts for the whole process
        torch.set_num_threads(before)


def _read_in_order(
    pool: ThreadPoolExecutor, source: FileSlice, chunks: Iterator[Chunk]
) -> Iterator[list[ChunkResult]]:
    """Yield results in the order of the file, with a bounded number of chunks being read."""
    # in file order, because CRCs are combined from left to right
    waiting: deque[Future[list[ChunkResult]]] = deque()
    for bundle in _bundles(chunks):
        waiting.append(pool.submit(read_chunks, source, bundle))
        if len(waiting) >= 2 * WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _bundles(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Bundle small chunks, so that handing them to a thread costs little beside the work."""
    bundle: list[Chunk] = []
    size = 0
    for chunk in chunks:
        bundle.append(chunk)
        size += chunk.size
        if size >= CHUNK // 2:
            yield bundle
            bundle = []
            size = 0
    if bundle:
        yield bundle


def _collect(results: Iterable[list[ChunkResult]], advance: Advance) -> Sums:
    """Add statistics to the segments, and combine the CRCs of parts in the order of the file."""
    crcs: dict[ChecksumRange, int] = {}
    for bundle in results:
        for result in bundle:
            for segment, offset, values in result.values:
                _add(segment, values, offset)
            for part, value in result.crcs:
                assert isinstance(part.owner, ChecksumRange)
                crcs[part.owner] = crc.combine(crcs.get(part.owner, 0), value, part.size)
            advance(result.chunk.size)
    return {owner: f"{value:08x}" for owner, value in crcs.items()}


def _add(segment: Segment, values: PieceStatistics, offset: int) -> None:
    seen = segment.seen
    if values.first is not None and seen.first is None:
        seen.first = offset // SIZES[segment.dtype] + values.first
    seen.count += values.count
    seen.nan += values.nan
    seen.positive += values.positive
    seen.negative += values.negative
    seen.low = min(seen.low, values.low)
    seen.high = max(seen.high, values.high)


def _hashes(source: FileSlice, checksums: Sequence[ChecksumRange]) -> Sums:
    """Compute XXH3 digests, which cannot be combined from parts: one thread, in file order."""
    running = {each: xxhash.xxh3_128() for each in checksums}
    buffer = memoryview(bytearray(PIECE))
    for chunk in cut([], checksums, PIECE, CHUNK):
        for start, size in pieces(chunk):
            fill(source, buffer[:size], chunk.start + start)
            for part in chunk.parts:
                assert isinstance(part.owner, ChecksumRange)
                wanted = buffer[:size]
                # only a chunk of one piece has parts that cover less than all of it
                if chunk.size <= PIECE:
                    wanted = buffer[part.offset : part.offset + part.size]
                running[part.owner].update(wanted)
    return {owner: digest.hexdigest() for owner, digest in running.items()}


def _compare(layout: FileLayout, sums: Sums) -> None:
    for each in layout.checksums:
        name = "digest"
        wanted = str(each.expected)
        if isinstance(each.expected, int):
            name = "CRC"
            wanted = f"{each.expected:08x}"
        # an empty range is in no chunk; the CRC of nothing is 0
        seen = sums.get(each, "00000000")
        if seen != wanted:
            detail = (
                f"{each.label}: its {name} is {seen}, it was written with {wanted}: bytes "
                f"have changed"
            )
            layout.problems.add("checksum", detail, tensor=each.tensor)


def _measure_outliers(source: FileSlice, layout: FileLayout) -> None:
    """Read tensors again whose largest value stands out, for the sum of their squares."""
    for tensor in layout.tensors:
        segment = tensor.segment
        if segment is not None and not segment.seen.squares and wants_squares(tensor):
            segment.seen.squares = _squares(source, segment)


def _squares(source: FileSlice, segment: Segment) -> float:
    buffer = bytearray(PIECE)
    view = memoryview(buffer)
    total = 0.0
    for chunk in cut([segment], [], PIECE, CHUNK):
        for start, size in pieces(chunk):
            fill(source, view[:size], chunk.start + start)
            values = tensor_stats.as_tensor(buffer, 0, size, segment.dtype)
            total += tensor_stats.squares(values)
    return total
