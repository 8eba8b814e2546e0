"""Read one chunk of a file piece by piece: statistics of its values, and its checksums."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stepguard.verification import crc, tensor_stats
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.chunks import Chunk, ChunkPart
from stepguard.verification.damage import Damaged
from stepguard.verification.dtype_names import SIZES
from stepguard.verification.file_layout import Segment
from stepguard.verification.tensor_stats import PieceStatistics

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
                values = tensor_stats.as_tensor(buffer, *key)
                known[key] = tensor_stats.statistics_of(values, owner.dtype)
            result.values.append((owner, chunk.start + part.offset - owner.start, known[key]))
        elif owner.algorithm == "crc32":
            result.crcs.append((part, crc.crc32(view[part.offset : part.offset + part.size])))
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
) -> tuple[dict[str, tensor_stats.Extremes], int]:
    """Read every piece once: its extremes by element type, and the CRC of the chunk."""
    view = memoryview(buffer)
    cuts = list(pieces(chunk))
    extremes = {dtype: tensor_stats.Extremes(dtype, len(cuts)) for dtype in dtypes}
    views: dict[tuple[int, str], Tensor] = {}
    total = 0
    for number, (start, size) in enumerate(cuts):
        fill(source, view[:size], chunk.start + start)
        for dtype in dtypes:
            # all pieces but the last have one size, and share the buffer
            if (size, dtype) not in views:
                views[size, dtype] = tensor_stats.as_tensor(buffer, 0, size, dtype)
            extremes[dtype].add(number, views[size, dtype])
        if with_crc:
            total = crc.crc32(view[:size], total)
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
            values = tensor_stats.as_tensor(buffer, 0, size, dtype)
            measured.append((start, tensor_stats.statistics_of(values, dtype)))
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
