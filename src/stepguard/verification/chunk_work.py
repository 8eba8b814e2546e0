"""What is done with one chunk of a file: read it piece by piece, look at the values, take the
checksums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stepguard.verification import crc, tensor_stats
from stepguard.verification.bounded_file import Window
from stepguard.verification.chunks import Chunk, Part
from stepguard.verification.damage import Damaged
from stepguard.verification.dtype_names import SIZES
from stepguard.verification.file_layout import Block, Segment
from stepguard.verification.tensor_stats import Values

PIECE = 1 << 19
"""Small enough to stay in the cache of the processor that read it until it was looked at."""
CHUNK = 16 << 20


@dataclass(slots=True)
class Done:
    """What was seen in a chunk."""

    chunk: Chunk
    values: list[tuple[Segment, int, Values]] = field(default_factory=list)
    """Segment, offset of the piece in it, and what the piece holds."""
    crcs: list[tuple[Part, int]] = field(default_factory=list)


def work(window: Window, chunks: Sequence[Chunk]) -> list[Done]:
    """A few chunks, by one thread with one small buffer."""
    buffer = bytearray(PIECE)
    return [_one(window, chunk, buffer) for chunk in chunks]


def _one(window: Window, chunk: Chunk, buffer: bytearray) -> Done:
    return _long(window, chunk, buffer) if chunk.size > PIECE else _short(window, chunk, buffer)


def _short(window: Window, chunk: Chunk, buffer: bytearray) -> Done:
    """One piece, with parts anywhere in it."""
    done = Done(chunk)
    view = memoryview(buffer)
    fill(window, view[: chunk.size], chunk.start)
    same: dict[tuple[int, int, str], Values] = {}
    for part in chunk.parts:
        owner = part.owner
        if isinstance(owner, Segment):
            key = part.offset, part.size, owner.dtype
            if key not in same:
                same[key] = tensor_stats.look(tensor_stats.view(buffer, *key), owner.dtype)
            done.values.append((owner, chunk.start + part.offset - owner.start, same[key]))
        elif owner.algorithm == "crc32":
            done.crcs.append((part, crc.crc32(view[part.offset : part.offset + part.size])))
    return done


def _long(window: Window, chunk: Chunk, buffer: bytearray) -> Done:
    """Several pieces; every part covers all of the chunk."""
    done, cuts, view = Done(chunk), list(pieces(chunk)), memoryview(buffer)
    segments = [part.owner for part in chunk.parts if isinstance(part.owner, Segment)]
    found = {owner.dtype: tensor_stats.Extremes(owner.dtype, len(cuts)) for owner in segments}
    summed = [
        part
        for part in chunk.parts
        if isinstance(part.owner, Block) and part.owner.algorithm == "crc32"
    ]
    seen: dict[int, dict[str, Tensor]] = {}
    total = 0
    for number, (start, size) in enumerate(cuts):
        if size not in seen:  # all but the last are of one size
            seen[size] = {dtype: tensor_stats.view(buffer, 0, size, dtype) for dtype in found}
        bytes_here = view[:size]
        fill(window, bytes_here, chunk.start + start)
        for dtype, values in seen[size].items():
            found[dtype].add(number, values)
        if summed:
            total = crc.crc32(bytes_here, total)
    done.crcs += [(part, total) for part in summed]
    for dtype, extremes in found.items():
        looked = _looked(window, chunk, extremes.bounds(), dtype, buffer)
        owners = [owner for owner in segments if owner.dtype == dtype]
        done.values += [
            (owner, chunk.start + at - owner.start, values)
            for owner in owners
            for at, values in looked
        ]
    return done


def _looked(
    window: Window,
    chunk: Chunk,
    bounds: Sequence[tuple[float, float]],
    dtype: str,
    buffer: bytearray,
) -> list[tuple[int, Values]]:
    """What is finite as one; a piece with anything else is read again and looked at closely."""
    looked: list[tuple[int, Values]] = []
    finite, elements = [], 0
    for (start, size), (low, high) in zip(pieces(chunk), bounds, strict=True):
        if math.isfinite(low) and math.isfinite(high):
            finite.append((low, high))
            elements += size // SIZES[dtype]
        else:
            fill(window, memoryview(buffer)[:size], chunk.start + start)
            looked.append(
                (start, tensor_stats.look(tensor_stats.view(buffer, 0, size, dtype), dtype))
            )
    if finite:
        looked.append(
            (0, Values(elements, min(low for low, _ in finite), max(high for _, high in finite)))
        )
    return looked


def pieces(chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Offset and size, in the chunk."""
    for start in range(0, chunk.size, PIECE):
        yield start, min(PIECE, chunk.size - start)


def fill(window: Window, view: memoryview, position: int) -> None:
    """Read exactly as much as the view takes. A file that became shorter meanwhile is torn."""
    filled, size = 0, len(view)
    while filled < size:
        try:
            count = os.preadv(window.descriptor, [view[filled:]], position + filled)
        except OSError as error:
            raise Damaged(
                "unreadable", f"cannot be read at byte {position:,}: {error.strerror}"
            ) from error
        if not count:
            raise Damaged(
                "torn", f"ends at byte {position + filled:,}: it became shorter while it was read"
            )
        filled += count
