"""One writer per folder: another process gets an error, another thread waits its turn.

POSIX record locks end with the process, however it ends, and a forked data loader does not inherit
them. They do not know threads and are lost when any descriptor of the file is closed, so each
process keeps one table of the folders it has locked.
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
"""Some network filesystems have no locks; there, keeping to one writer is up to the user."""


@dataclass(slots=True)
class _LockedFolder:
    """A folder that this process writes to."""

    descriptor: int
    owners: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None


_LOCKED: dict[Path, _LockedFolder] = {}
# reentrant: the garbage collector can release one lock while this thread is taking another
_TABLE = threading.RLock()


class WriterLock:
    """A store's right to write into its folder, from its first save until it is released."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._pid = 0
        self._folder = folder.resolve()
        with _TABLE:
            if self._folder not in _LOCKED:
                _LOCKED[self._folder] = _LockedFolder(_lock(self._folder, disk))
            _LOCKED[self._folder].owners += 1
        self._pid = os.getpid()

    @property
    def lost(self) -> bool:
        """Was it released, or is this a fork? Locks belong to the process that took them."""
        return self._pid != os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Allow one save at a time; a thread waits for another, but not for itself."""
        locked = _LOCKED[self._folder]
        if locked.thread == threading.get_ident():
            raise StoreError(
                f"{self._folder} is being written by this very thread: a save cannot start inside "
                f"a save."
            )
        with locked.turn:
            locked.thread = threading.get_ident()
            try:
                yield
            finally:
                locked.thread = None

    def release(self) -> None:
        """Let another process write; a second call does nothing."""
        if self.lost:
            return
        self._pid = 0
        with _TABLE:
            locked = _LOCKED[self._folder]
            locked.owners -= 1
            if not locked.owners:
                os.close(locked.descriptor)
                del _LOCKED[self._folder]

    def __del__(self) -> None:
        self.release()


def _lock(folder: Path, disk: Disk) -> int:
    """Lock a folder for this process; returns the descriptor that holds the lock."""
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


def _forget_locks() -> None:
    """Empty the table in a forked child, which has none of the locks."""
    global _TABLE
    # another thread of the parent may have held it at the moment of the fork
    _TABLE = threading.RLock()
    for locked in _LOCKED.values():
        os.close(locked.descriptor)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_forget_locks)
