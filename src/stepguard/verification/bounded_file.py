"""A file opened so that only its bytes can be read: no device, no FIFO, and never more than is
there.
"""

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


class Window:
    """`size` bytes of an open file from `start` on, read exactly or not at all."""

    def __init__(self, descriptor: int, start: int, size: int, path: Path) -> None:
        self.descriptor, self.start, self.size, self.path = descriptor, start, size, path
        self._position = 0
        self._buffer, self._taken = b"", 0

    def tell(self) -> int:
        """Offset in this window."""
        return self._position - len(self._buffer) + self._taken

    def seek(self, position: int) -> None:
        self._buffer, self._taken, self._position = b"", 0, position

    @property
    def left(self) -> int:
        return self.size - self.tell()

    def window(self, start: int, size: int) -> Window:
        """A part of this window; it must lie inside."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Damaged(
                "torn",
                f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}",
            )
        return Window(self.descriptor, self.start + start, size, self.path)

    def at(self, position: int, size: int) -> bytes:
        """Up to `size` bytes at `position`, whatever was read before."""
        size = max(0, min(size, self.size - position))
        return _pread(self.descriptor, size, self.start + position)

    def byte(self) -> int:
        if self._taken < len(self._buffer):
            value = self._buffer[self._taken]
            self._taken += 1
            return value
        return self.read(1)[0]

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes. What is declared but not there is torn, and costs no memory."""
        end = self._taken + count
        if end <= len(self._buffer):
            data = self._buffer[self._taken : end]
            self._taken = end
            return data
        position = self.tell()
        if count > self.size - position:
            raise Damaged(
                "torn",
                f"ends at byte {self.size:,} where {count:,} more are declared at {position:,}",
            )
        self._buffer = _pread(
            self.descriptor, min(max(count, BUFFER), self.size - position), self.start + position
        )
        self._position, self._taken = position + len(self._buffer), count
        if len(self._buffer) < count:
            raise Damaged(
                "torn", f"ends at byte {self._position:,}: it became shorter while it was read"
            )
        return self._buffer[:count]

    def skip(self, count: int) -> None:
        if count > self.left:
            raise Damaged(
                "torn",
                f"ends at byte {self.size:,} where {count:,} more are declared at {self.tell():,}",
            )
        self.seek(self.tell() + count)

    def line(self, longest: int) -> bytes:
        """Up to a newline, which is taken and left out."""
        end = self._buffer.find(b"\n", self._taken, self._taken + longest + 1)
        if end < 0:
            position = self.tell()
            data = self.at(position, longest + 1)
            found = data.find(b"\n")
            if found < 0:
                raise Damaged(
                    "malformed", f"a line at byte {position:,} has no end within {longest:,} bytes"
                )
            self.seek(position + found + 1)
            return data[:found]
        data = self._buffer[self._taken : end]
        self._taken = end + 1
        return data


class Clamped(io.RawIOBase):
    """A window as a file object for `zipfile`: a read never allocates more than there is, nor more
    than `most`.
    """

    def __init__(self, window: Window, most: int) -> None:
        super().__init__()
        self._window, self._most, self._position = window, most, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._window.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._window.size - self._position)
        size = left if size is None or size < 0 else min(size, left)
        if size > self._most:
            raise Damaged(
                "limit",
                f"a zip directory of {size:,} bytes is more than the {self._most:,} that are read",
            )
        data = self._window.at(self._position, size)
        self._position += len(data)
        return data


@contextmanager
def opened(path: Path) -> Iterator[Window]:
    """The whole file. Anything but a regular file is refused, and a device is not even opened."""
    try:
        refuse_special(path.stat().st_mode)
        # O_NONBLOCK: opening a FIFO nobody writes to must not wait
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise Damaged("unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        refuse_special(facts.st_mode)  # it may have been exchanged since
        yield Window(descriptor, 0, facts.st_size, path)
    finally:
        os.close(descriptor)


def refuse_special(mode: int) -> None:
    """A FIFO, a socket, a device or a folder, by its mode."""
    if not stat.S_ISREG(mode):
        raise Damaged("unreadable", f"is {special(mode)}, not a file")


def special(mode: int) -> str:
    """`a device`, for a message."""
    return KINDS.get(stat.S_IFMT(mode), "no file")


def _pread(descriptor: int, size: int, position: int) -> bytes:
    """A short read only at the end of the file."""
    try:
        data = os.pread(descriptor, size, position)
        while len(data) < size and (
            more := os.pread(descriptor, size - len(data), position + len(data))
        ):
            data += more
    except OSError as error:
        raise Damaged(
            "unreadable", f"cannot be read at byte {position:,}: {error.strerror}"
        ) from error
    return data
