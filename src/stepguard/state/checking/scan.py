"""One pass over a file: every chunk is read once, and looked at and summed while it is in the cache."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stepguard.state.checking import crc, kernels
from stepguard.state.checking.chunks import Chunk, Part, cut, merge
from stepguard.state.checking.damage import Damaged
from stepguard.state.checking.dtypes import SIZES
from stepguard.state.checking.judge import wants_squares
from stepguard.state.checking.kernels import Values
from stepguard.state.checking.layout import Block, Layout, Segment
from stepguard.state.checking.source import Window

CHUNK = 1 << 20
"""Small enough that a chunk is still in the cache when it is looked at."""
WORKERS = min(4, os.cpu_count() or 1)
SMALL = 4 << 20
"""Files up to this size are not worth a thread."""


@dataclass(slots=True)
class _Done:
    """A chunk after its worker: the buffer is still held for the checksums that need an order."""

    chunk: Chunk
    buffer: bytearray
    values: list[tuple[Part, Values]]
    crcs: list[tuple[Part, int]]


def scan(window: Window, layout: Layout, advance: Callable[[int], None]) -> None:
    """Fill the statistics of every segment, and take a note of every checksum that does not fit."""
    segments = merge(layout.looks)
    chunks = cut(segments, layout.blocks, CHUNK)
    sums = _Checksums(layout)
    for done in _ahead(window, chunks):
        for part, values in done.values:
            assert isinstance(part.owner, Segment)
            _add(part.owner, values, done.chunk.start + part.offset - part.owner.start)
        sums.add(done)
        advance(done.chunk.size)
    sums.finish()
    for look in layout.looks:
        if look.segment is not None and not look.segment.seen.squares and wants_squares(look):
            look.segment.seen.squares = _squares(window, look.segment)


def _ahead(window: Window, chunks: Iterator[Chunk]) -> Iterator[_Done]:
    """Chunks in the order of the file, worked on by a few threads at once."""
    free = [bytearray(CHUNK) for _ in range(2 * WORKERS)]
    if window.size <= SMALL or WORKERS == 1:
        for chunk in chunks:
            yield _work(window, chunk, free[0])
        return
    with _one_thread_each(), ThreadPoolExecutor(WORKERS, "stepguard-verify", torch.set_num_threads, (1,)) as pool:
        waiting: deque[Future[_Done]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(_work, window, chunk, free.pop()))
            if not free:
                done = waiting.popleft().result()
                yield done
                free.append(done.buffer)
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """The workers are the parallelism; torch's own threads inside them would only get in each other's way."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _work(window: Window, chunk: Chunk, buffer: bytearray) -> _Done:
    _fill(window, chunk, buffer)
    done = _Done(chunk, buffer, [], [])
    view = memoryview(buffer)
    for part in chunk.parts:
        owner = part.owner
        if isinstance(owner, Segment):
            done.values.append((part, kernels.look(buffer, part.offset, part.size, owner.dtype)))
        elif owner.algorithm == "crc32":
            done.crcs.append((part, zlib.crc32(view[part.offset : part.offset + part.size])))
    return done


def _fill(window: Window, chunk: Chunk, buffer: bytearray) -> None:
    view = memoryview(buffer)[: chunk.size]
    filled = 0
    while filled < chunk.size:
        try:
            count = os.preadv(window.descriptor, [view[filled:]], chunk.start + filled)
        except OSError as error:
            raise Damaged("unreadable", f"cannot be read at byte {chunk.start:,}: {error.strerror}") from error
        if not count:
            raise Damaged("torn", f"ends at byte {chunk.start + filled:,}: it became shorter while it was read")
        filled += count


def _add(segment: Segment, values: Values, offset: int) -> None:
    seen = segment.seen
    if values.first is not None and seen.first is None:
        seen.first = offset // SIZES[segment.dtype] + values.first
    seen.count += values.count
    seen.nan += values.nan
    seen.positive += values.positive
    seen.negative += values.negative
    seen.low, seen.high = min(seen.low, values.low), max(seen.high, values.high)


def _squares(window: Window, segment: Segment) -> float:
    """A second look at a tensor whose largest value stands out."""
    buffer = bytearray(CHUNK)
    total = 0.0
    for chunk in cut([segment], [], CHUNK):
        _fill(window, chunk, buffer)
        total += sum(kernels.squares(buffer, part.offset, part.size, segment.dtype) for part in chunk.parts)
    return total


class _Checksums:
    """Running checksums of the blocks, in the order of the file."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._crcs: dict[int, int] = {}
        self._hashes: dict[int, Any] = {}
        for block in layout.blocks:
            if block.algorithm == "xxh3_128":
                import xxhash

                self._hashes[id(block)] = xxhash.xxh3_128()

    def add(self, done: _Done) -> None:
        for part, value in done.crcs:
            self._crcs[id(part.owner)] = crc.combine(self._crcs.get(id(part.owner), 0), value, part.size)
        if self._hashes:
            view = memoryview(done.buffer)
            for part in done.chunk.parts:
                if id(part.owner) in self._hashes:
                    self._hashes[id(part.owner)].update(view[part.offset : part.offset + part.size])

    def finish(self) -> None:
        for block in self._layout.blocks:
            if block.algorithm == "crc32":
                self._compare(block, f"{self._crcs.get(id(block), 0):08x}", f"{block.expected:08x}")
            else:
                self._compare(block, self._hashes[id(block)].hexdigest(), str(block.expected))

    def _compare(self, block: Block, seen: str, wanted: str) -> None:
        if seen != wanted:
            name = "CRC" if block.algorithm == "crc32" else "digest"
            detail = f"{block.label}: its {name} is {seen}, it was written with {wanted}: bytes have changed"
            self._layout.notes.add("checksum", detail, tensor=block.tensor)
