"""Read a file exactly and never beyond its end; devices, FIFOs and sockets are refused."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepguard.verification.damage import Damaged

BUFFER = 1 << 18
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class FileSlice:
    """`size` bytes of an open file from `start` on, read exactly or not at all."""

    def __init__(self, descriptor: int, start: int, size: int, path: Path) -> None:
        self.descriptor = descriptor
        self.start = start
        self.size = size
        self.path = path

    def part(self, start: int, size: int) -> FileSlice:
        """Return a slice of this slice; it must lie inside."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Damaged(
                "torn",
                f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}",
            )
        return FileSlice(self.descriptor, self.start + start, size, self.path)

    def at(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes at `position`."""
        size = max(0, min(size, self.size - position))
        return _pread(self.descriptor, size, self.start + position)

    def exactly(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`, or raise Damaged before memory is taken for them."""
        if size > self.size - position:
            raise Damaged(
                "torn",
                f"ends at byte {self.size:,} where {size:,} more are declared at {position:,}",
            )
        data = self.at(position, size)
        if len(data) < size:
            raise Damaged(
                "torn",
                f"ends at byte {position + len(data):,}: it became shorter while it was read",
            )
        return data

    def reader(self) -> io.BufferedReader:
        """Return a file object of the slice, for readers that go from opcode to opcode."""
        return io.BufferedReader(_SliceStream(self), BUFFER)


class _SliceStream(io.RawIOBase):
    """A slice as a raw stream; it reads by offset and leaves the position of the file alone."""

    def __init__(self, source: FileSlice) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._source.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def open_file(path: Path) -> Iterator[FileSlice]:
    """Open a regular file as a slice of its whole length; anything else is refused unopened."""
    try:
        refuse_special(path.stat().st_mode)
        # without O_NONBLOCK, opening a FIFO that has no writer would wait forever
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise Damaged("unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        # the path may have been replaced between stat and open
        refuse_special(facts.st_mode)
        yield FileSlice(descriptor, 0, facts.st_size, path)
    finally:
        os.close(descriptor)


def refuse_special(mode: int) -> None:
    """Raise Damaged for the mode of a FIFO, a socket, a device or a folder."""
    if not stat.S_ISREG(mode):
        raise Damaged("unreadable", f"is {special_name(mode)}, not a file")


def special_name(mode: int) -> str:
    """Name the kind of a special file for a message: `a device`."""
    return KINDS.get(stat.S_IFMT(mode), "something else")


def _pread(descriptor: int, size: int, position: int) -> bytes:
    """Read `size` bytes at `position`; fewer only at the end of the file."""
    data = b""
    try:
        # one pread returns at most 2 GB on Linux, and less after a signal
        while len(data) < size:
            more = os.pread(descriptor, size - len(data), position + len(data))
            if not more:
                break
            data = data + more if data else more
    except OSError as error:
        raise Damaged(
            "unreadable", f"cannot be read at byte {position:,}: {error.strerror}"
        ) from error
    return data
