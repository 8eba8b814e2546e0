"""What is done with one chunk of a file: read it piece by piece, look at the values, take the checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stepguard.state.checking import crc, kernels
from stepguard.state.checking.chunks import Chunk, Part
from stepguard.state.checking.damage import Damaged
from stepguard.state.checking.kernels import Values
from stepguard.state.checking.layout import Segment
from stepguard.state.checking.source import Window

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
    done = Done(chunk)
    sums = [0] * len(chunk.parts)
    view = memoryview(buffer)
    same: dict[tuple[int, int, str], Tensor] = {}
    for start, size in pieces(chunk):
        fill(window, view[:size], chunk.start + start)
        for number, part in enumerate(chunk.parts):
            # a chunk of one piece has parts anywhere in it, a longer one only such that cover all of it
            offset, length = (part.offset, part.size) if chunk.size <= PIECE else (0, size)
            owner = part.owner
            if isinstance(owner, Segment):
                key = offset, length, owner.dtype
                tensor = same.get(key)
                if tensor is None:
                    tensor = same[key] = kernels.view(buffer, offset, length, owner.dtype)
                values = kernels.look(tensor, owner.dtype)
                done.values.append((owner, chunk.start + start + offset - owner.start, values))
            elif owner.algorithm == "crc32":
                sums[number] = crc.crc32(view[offset : offset + length], sums[number])
    for part, value in zip(chunk.parts, sums, strict=True):
        if not isinstance(part.owner, Segment) and part.owner.algorithm == "crc32":
            done.crcs.append((part, value))
    return done


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
            raise Damaged("unreadable", f"cannot be read at byte {position:,}: {error.strerror}") from error
        if not count:
            raise Damaged("torn", f"ends at byte {position + filled:,}: it became shorter while it was read")
        filled += count
