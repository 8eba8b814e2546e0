"""One writer a folder: another process gets a clear error, another thread waits its turn.

POSIX record locks, because they end with the process, however it ends, and a forked data loader
does not inherit them. They do not know threads and are lost when any descriptor of the file is
closed, so each process keeps one table.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stepguard._errors import StoreError
from stepguard.state.atomic import Disk

LOCK = ".writer.lock"
_NO_LOCKS_HERE = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""Some network filesystems have none; then two writers are the user's affair."""


@dataclass(slots=True)
class _Hold:
    """A folder this process writes to."""

    descriptor: int
    owners: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None


_HOLDS: dict[Path, _Hold] = {}
_TABLE = threading.RLock()
"""Reentrant, because a claim can be collected, and so released, while this thread is making
another.
"""


class Claim:
    """A store's right to write into its folder, from its first save until it is released or
    collected.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._pid = 0
        self._folder = folder.resolve()
        with _TABLE:
            if self._folder not in _HOLDS:
                _HOLDS[self._folder] = _Hold(_locked(self._folder, disk))
            _HOLDS[self._folder].owners += 1
        self._pid = os.getpid()

    @property
    def lost(self) -> bool:
        """Released, or this is a forked process: locks belong to the one that made them."""
        return self._pid != os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One save at a time."""
        hold = _HOLDS[self._folder]
        if hold.thread == threading.get_ident():
            raise StoreError(
                f"{self._folder} is being written by this very thread: a save cannot start inside "
                f"a save."
            )
        with hold.turn:
            hold.thread = threading.get_ident()
            try:
                yield
            finally:
                hold.thread = None

    def release(self) -> None:
        """Let others write; a second time does nothing."""
        if self.lost:
            return
        self._pid = 0
        with _TABLE:
            hold = _HOLDS[self._folder]
            hold.owners -= 1
            if not hold.owners:
                os.close(hold.descriptor)
                del _HOLDS[self._folder]

    def __del__(self) -> None:
        self.release()


def _locked(folder: Path, disk: Disk) -> int:
    path = folder / LOCK
    with suppress(FileExistsError), disk.new_file(path):
        pass
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in _NO_LOCKS_HERE:
            return descriptor
        os.close(descriptor)
        if fault.errno not in {errno.EACCES, errno.EAGAIN}:
            raise
        raise StoreError(
            f"another process writes checkpoints into {folder}; end it, or give each run a folder "
            f"of its own."
        ) from None
    return descriptor


def _forget() -> None:
    """After a fork: the child has none of the locks."""
    global _TABLE
    _TABLE = threading.RLock()
    for hold in _HOLDS.values():
        os.close(hold.descriptor)
    _HOLDS.clear()


os.register_at_fork(after_in_child=_forget)
