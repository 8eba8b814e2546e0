"""Read a file exactly and never beyond its end; devices, FIFOs and sockets are refused."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        self._buffer = b""
        self._buffer_end = 0
        """Offset in this slice where the buffer ends."""
        self._taken = 0
        """Bytes of the buffer that were handed out."""

    def tell(self) -> int:
        """Return the offset in this slice."""
        return self._buffer_end - len(self._buffer) + self._taken

    def seek(self, position: int) -> None:
        # reads go by os.pread, so nothing has to be moved in the file itself
        self._buffer = b""
        self._taken = 0
        self._buffer_end = position

    @property
    def left(self) -> int:
        return self.size - self.tell()

    def part(self, start: int, size: int) -> FileSlice:
        """Return a slice of this slice; it must lie inside."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Damaged(
                "torn",
                f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}",
            )
        return FileSlice(self.descriptor, self.start + start, size, self.path)

    def at(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes at `position`; does not move the reading position."""
        size = max(0, min(size, self.size - position))
        return _pread(self.descriptor, size, self.start + position)

    def byte(self) -> int:
        if self._taken < len(self._buffer):
            value = self._buffer[self._taken]
            self._taken += 1
            return value
        return self.read(1)[0]

    def read(self, count: int) -> bytes:
        """Return exactly `count` bytes, or raise Damaged before memory is taken for them."""
        end = self._taken + count
        if end <= len(self._buffer):
            data = self._buffer[self._taken : end]
            self._taken = end
            return data
        position = self.tell()
        left = self.size - position
        if count > left:
            raise self._too_short(count, position)
        self._buffer = _pread(self.descriptor, min(max(count, BUFFER), left), self.start + position)
        self._buffer_end = position + len(self._buffer)
        self._taken = count
        if len(self._buffer) < count:
            raise Damaged(
                "torn", f"ends at byte {self._buffer_end:,}: it became shorter while it was read"
            )
        return self._buffer[:count]

    def skip(self, count: int) -> None:
        if count > self.left:
            raise self._too_short(count, self.tell())
        self.seek(self.tell() + count)

    def line(self, longest: int) -> bytes:
        """Read up to a newline, which is consumed but not returned."""
        end = self._buffer.find(b"\n", self._taken, self._taken + longest + 1)
        if end >= 0:
            data = self._buffer[self._taken : end]
            self._taken = end + 1
            return data
        position = self.tell()
        data = self.at(position, longest + 1)
        end = data.find(b"\n")
        if end < 0:
            raise Damaged(
                "malformed", f"a line at byte {position:,} has no end within {longest:,} bytes"
            )
        self.seek(position + end + 1)
        return data[:end]

    def _too_short(self, count: int, position: int) -> Damaged:
        return Damaged(
            "torn", f"ends at byte {self.size:,} where {count:,} more are declared at {position:,}"
        )


class ZipSource(io.RawIOBase):
    """A slice as the file object `zipfile` wants; no single read is longer than `most` bytes.

    `zipfile` reads the whole central directory at once, with the size that the file declares.
    """

    def __init__(self, source: FileSlice, most: int) -> None:
        super().__init__()
        self._source = source
        self._most = most
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._source.size - self._position)
        if size is None or size < 0:
            size = left
        size = min(size, left)
        if size > self._most:
            raise Damaged(
                "limit",
                f"a zip directory of {size:,} bytes is more than the {self._most:,} that are read",
            )
        data = self._source.at(self._position, size)
        self._position += len(data)
        return data


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
