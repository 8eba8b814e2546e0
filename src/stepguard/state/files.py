"""Write files and folders that are either complete or absent, through one seam to the disk.

Whatever changes a disk (mkdir, create, write, sync, rename, unlink, rmdir) passes through
`Disk.perform` as one `Operation`. So every instant at which a process can die or a disk can fail
has a number, and tests try them all.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

# --- Write files and folders that are either complete or absent, through one seam to the disk.


Result = TypeVar("Result")
Kind = Literal["mkdir", "create", "write", "sync", "sync_folder", "rename", "unlink", "rmdir"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the disk."""

    kind: Kind
    path: Path
    target: Path | None = None
    """The new name, of a rename."""
    data: memoryview | None = None
    """The bytes, of a write."""
    offset: int = 0
    """Where in the file they go."""


class Disk:
    """Operations that change a disk. A slow, full, failing or recorded one overrides `perform`."""

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        """Carry out one operation by calling `act`; every operation passes here."""
        return act()

    def mkdir(self, path: Path) -> None:
        self.perform(Operation("mkdir", path), path.mkdir)

    def new_file(self, path: Path) -> NewFile:
        """Create a file that must not exist yet, symbolic links included."""
        return NewFile(self, path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        self.perform(Operation("sync_folder", path), lambda: sync(path))

    def rename(self, path: Path, target: Path) -> None:
        """Move within a folder in one step; a file at `target` is replaced."""
        self.perform(Operation("rename", path, target), lambda: path.replace(target))

    def unlink(self, path: Path) -> None:
        self.perform(Operation("unlink", path), path.unlink)

    def rmdir(self, path: Path) -> None:
        self.perform(Operation("rmdir", path), path.rmdir)

    def rmtree(self, path: Path) -> None:
        """Remove a folder and its content, one operation a name; links are not followed."""
        for child in sorted(path.iterdir()):
            if stat.S_ISDIR(child.lstat().st_mode):
                self.rmtree(child)
            else:
                self.unlink(child)
        self.rmdir(path)

    def make_folders(self, path: Path) -> None:
        """Make the folder and those above it, each durable in its parent."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        with suppress(FileExistsError):
            self.mkdir(path)
        self.sync_folder(path.parent)


class NewFile:
    """A file being written; without `sync` before `close` a power cut may lose its content."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.path = path
        self.size = self.synced = 0
        self._disk = disk
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = disk.perform(Operation("create", path), lambda: os.open(path, flags, 0o666))

    def write(self, data: memoryview | bytes) -> None:
        """Append; a disk that takes only a part is asked again until it refuses."""
        view = memoryview(data).cast("B")
        self._disk.perform(
            Operation("write", self.path, data=view, offset=self.size),
            lambda: self._write_all(view),
        )
        self.size += len(view)

    def sync(self) -> None:
        """Make the content durable."""
        self._disk.perform(Operation("sync", self.path), lambda: os.fsync(self._fd))
        self.synced = self.size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def _write_all(self, view: memoryview) -> None:
        while view:
            view = view[os.write(self._fd, view) :]


DISK = Disk()
_NUMBERS = itertools.count()


def sibling(path: Path, ending: str = "tmp") -> Path:
    """Return a hidden name beside `path` that no other writer has: `.step-100.4711-3.tmp`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{next(_NUMBERS)}.{ending}")


def write_file(path: Path, content: bytes, disk: Disk = DISK) -> None:
    """Replace `path` in one step; a crash leaves the old file or the new one."""
    disk.make_folders(path.parent)
    temporary = sibling(path)
    try:
        with disk.new_file(temporary) as file:
            file.write(content)
            file.sync()
        disk.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.sync_folder(path.parent)


@contextmanager
def new_folder(path: Path, disk: Disk = DISK) -> Iterator[Path]:
    """Fill a temporary sibling; it takes the name `path` only when everything in it is on disk."""
    disk.make_folders(path.parent)
    temporary = sibling(path)
    disk.mkdir(temporary)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync(file)
        disk.sync_folder(temporary)
        disk.rename(temporary, path)
        disk.sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- Available host memory of this process.


SHARE_OF_FREE = 0.5
"""Share of the free memory that is taken for snapshots, or to gather a model, without a limit."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def free_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Return the available bytes within the limit of a container; None if unknown."""
    machine = _machine(meminfo)
    limit = _read(cgroup / "memory.max")
    used = _read(cgroup / "memory.current")
    # "max" stands for no limit.
    if machine is None or not limit.isdigit() or not used.isdigit():
        return machine
    # The kernel frees cached files when the memory is needed.
    cached = _field(_read(cgroup / "memory.stat"), "inactive_file") or 0
    return max(0, min(machine, int(limit) - int(used) + cached))


def _machine(meminfo: Path) -> int | None:
    available = _field(_read(meminfo), "MemAvailable:")
    if available is not None:
        return available * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if line.startswith(name) and len(words) > 1 and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
