"""Append lines to a file so that each is there wholly or not at all, whatever the disk does."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class LineFile:
    """Appends whole lines with one `write` each. One writer; several threads of it may write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A checkpoint that is written in the background reports from its own thread.
        self._turn = threading.Lock()
        self._fd = -1
        self._torn = False
        self._open()

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Write a line that ends in a newline; `durable` waits until it is on disk.

        Raises OSError where the line cannot be written.
        """
        with self._turn:
            deleted = os.fstat(self._fd).st_nlink == 0
            if deleted:
                self._make_again()
            self._append(line)
            if durable:
                os.fsync(self._fd)

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._fd).st_size
        left = b"\n" + line if self._torn else line
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except BaseException:
            self._cut(size)
            raise
        self._torn = False

    def _cut(self, size: int) -> None:
        """Remove the part of the line that a full disk took, or let the next line end it."""
        if os.fstat(self._fd).st_size == size:
            return
        self._torn = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)
            self._torn = _ends_torn(self._fd)

    def _make_again(self) -> None:
        """Make the file again after its path was deleted: the open one is invisible by now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        gone = self._fd
        self._open()
        os.close(gone)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._torn = _ends_torn(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _ends_torn(fd: int) -> bool:
    """Has a crash left half a line at the end?"""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
