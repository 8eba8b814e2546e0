"""One pass over a file by a few threads: the values of every tensor, and every checksum."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import xxhash

from stepguard.verification import crc, tensor_stats
from stepguard.verification.bounded_file import Window
from stepguard.verification.chunk_work import CHUNK, PIECE, Done, fill, pieces, work
from stepguard.verification.chunks import Chunk, cut, merge
from stepguard.verification.dtype_names import SIZES
from stepguard.verification.file_layout import Block, Layout, Segment
from stepguard.verification.tensor_stats import Values
from stepguard.verification.value_rules import wants_squares

WORKERS = min(4, os.cpu_count() or 1)
SMALL = 4 << 20
"""Files up to this size are not worth a thread."""
Advance = Callable[[int], None]


def scan(window: Window, layout: Layout, advance: Advance) -> None:
    """Fill the statistics of every segment, and take a note of every checksum that does not fit."""
    segments = merge(layout.looks)
    blocks = [block for block in layout.blocks if block.algorithm == "crc32"]
    hashed = [block for block in layout.blocks if block.algorithm != "crc32"]
    chunks = cut(segments, blocks, PIECE, CHUNK)
    sums: dict[Block, str] = {}
    if window.size <= SMALL or WORKERS == 1:
        sums |= _hashes(window, hashed)
        sums |= _gather((work(window, [chunk]) for chunk in chunks), advance)
    else:
        with _pool() as pool:
            hashing = pool.submit(_hashes, window, hashed)
            sums |= _gather(_ahead(pool, window, chunks), advance)
            sums |= hashing.result()
    _compare(layout, sums)
    for look in layout.looks:
        if look.segment is not None and not look.segment.seen.squares and wants_squares(look):
            look.segment.seen.squares = _squares(window, look.segment)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """The workers are the parallelism; torch's own threads inside them would only get in each
    other's way.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(WORKERS, "stepguard-verify", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _ahead(
    pool: ThreadPoolExecutor, window: Window, chunks: Iterator[Chunk]
) -> Iterator[list[Done]]:
    """In the order of the file, with a bounded number on the way."""
    waiting: deque[Future[list[Done]]] = deque()
    for bundle in _bundles(chunks):
        waiting.append(pool.submit(work, window, bundle))
        if len(waiting) >= 2 * WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _bundles(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Small chunks together, so that handing them over costs little beside the work."""
    bundle: list[Chunk] = []
    size = 0
    for chunk in chunks:
        bundle.append(chunk)
        size += chunk.size
        if size >= CHUNK // 2:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


def _gather(results: Iterator[list[Done]], advance: Advance) -> dict[Block, str]:
    """Statistics into the segments; the CRC of every block from those of its parts."""
    crcs: dict[Block, int] = {}
    for done in (done for bundle in results for done in bundle):
        for segment, offset, values in done.values:
            _add(segment, values, offset)
        for part, value in done.crcs:
            assert isinstance(part.owner, Block)
            crcs[part.owner] = crc.combine(crcs.get(part.owner, 0), value, part.size)
        advance(done.chunk.size)
    return {block: f"{value:08x}" for block, value in crcs.items()}


def _add(segment: Segment, values: Values, offset: int) -> None:
    seen = segment.seen
    if values.first is not None and seen.first is None:
        seen.first = offset // SIZES[segment.dtype] + values.first
    seen.count += values.count
    seen.nan += values.nan
    seen.positive += values.positive
    seen.negative += values.negative
    seen.low, seen.high = min(seen.low, values.low), max(seen.high, values.high)


def _hashes(window: Window, blocks: Sequence[Block]) -> dict[Block, str]:
    """Digests that cannot be put together from parts: one thread, in the order of the file."""
    running = {block: xxhash.xxh3_128() for block in blocks}
    buffer = memoryview(bytearray(PIECE))
    for chunk in cut([], blocks, PIECE, CHUNK):
        for start, size in pieces(chunk):
            fill(window, buffer[:size], chunk.start + start)
            for part in chunk.parts:
                assert isinstance(part.owner, Block)
                offset, length = (part.offset, part.size) if chunk.size <= PIECE else (0, size)
                running[part.owner].update(buffer[offset : offset + length])
    return {block: digest.hexdigest() for block, digest in running.items()}


def _squares(window: Window, segment: Segment) -> float:
    """A second look at a tensor whose largest value stands out."""
    buffer = bytearray(PIECE)
    view = memoryview(buffer)
    total = 0.0
    for chunk in cut([segment], [], PIECE, CHUNK):
        for start, size in pieces(chunk):
            fill(window, view[:size], chunk.start + start)
            total += tensor_stats.squares(tensor_stats.view(buffer, 0, size, segment.dtype))
    return total


def _compare(layout: Layout, sums: dict[Block, str]) -> None:
    for block in layout.blocks:
        is_crc = isinstance(block.expected, int)
        wanted = f"{block.expected:08x}" if is_crc else str(block.expected)
        seen = sums.get(block, "00000000")
        if seen != wanted:
            name = "CRC" if is_crc else "digest"
            detail = (
                f"{block.label}: its {name} is {seen}, it was written with {wanted}: bytes "
                f"have changed"
            )
            layout.notes.add("checksum", detail, tensor=block.tensor)
