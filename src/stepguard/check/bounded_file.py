"""Bounded reads of files that are not trusted, and the list of problems found in one of them."""

from __future__ import annotations

import io
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepguard.records.checks import Problem, ProblemKind, Role, Weight

LARGEST_INDEX = 32 << 20
"""Bytes of a zip directory, a safetensors header or a JSON file: about 300 000 tensors."""
MOST_PER_KIND = 20
"""Problems of one kind that are listed for one file; the others are counted in one line."""
LONGEST_NAME = 200
LONGEST_DETAIL = 600
BUFFER = 1 << 18
FILE_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class Damaged(Exception):  # noqa: N818 (an outcome of reading, not a fault of ours)
    """Reading cannot continue; carries the kind of problem and a sentence."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class ProblemList:
    """The problems of one file. Only the first of each kind are kept, the others are counted."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self._kept: list[Problem] = []
        self._seen: Counter[tuple[ProblemKind, Weight]] = Counter()

    def add(
        self,
        kind: ProblemKind,
        detail: str,
        *,
        tensor: str | None = None,
        severity: Weight = "error",
        role: Role | None = None,
    ) -> None:
        """Add a problem; its texts come from a file and are cleaned."""
        self._seen[kind, severity] += 1
        if self._seen[kind, severity] > MOST_PER_KIND:
            return
        if tensor is not None:
            tensor = clean(tensor, LONGEST_NAME)
        detail = clean(detail, LONGEST_DETAIL)
        problem = Problem(
            file=self.file, kind=kind, tensor=tensor, detail=detail, severity=severity, role=role
        )
        self._kept.append(problem)

    def all(self) -> list[Problem]:
        """Return the kept problems, and one line for each kind that has more."""
        listed = list(self._kept)
        for (kind, severity), seen in self._seen.items():
            more = seen - MOST_PER_KIND
            if more > 0:
                detail = f"and {more} more of this kind in this file"
                listed.append(Problem(file=self.file, kind=kind, severity=severity, detail=detail))
        return listed


def clean(text: str, longest: int) -> str:
    """Replace unprintable characters and shorten: text from a file must not control a terminal."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    if len(shown) > longest:
        return shown[: longest - 3] + "..."
    return shown


def first_few(items: Iterable[object]) -> str:
    """List the first five items, and how many more there are."""
    listed = list(map(str, items))
    more = len(listed) - 5
    return ", ".join(listed[:5]) + (f" and {more} more" if more > 0 else "")


class FileSlice(io.RawIOBase):
    """`size` bytes of an open file from `start` on, read exactly or not at all."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.start = start
        self.size = size
        self._position = 0

    def part(self, start: int, size: int) -> FileSlice:
        """Return a slice of this slice; it must lie inside."""
        if start < 0 or size < 0 or start + size > self.size:
            detail = f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}"
            raise Damaged("torn", detail)
        return FileSlice(self.descriptor, self.start + start, size)

    def at(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes at `position`."""
        return self.exactly(position, max(0, min(size, self.size - position)))

    def exactly(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`, or raise Damaged before memory is taken for them."""
        self.check_left(position, size)
        data = bytearray(size)
        self.fill(memoryview(data), position)
        return bytes(data)

    def check_left(self, position: int, size: int) -> None:
        """Raise Damaged if fewer than `size` bytes follow `position`."""
        if size > self.size - position:
            detail = f"ends at byte {self.size:,} where {size:,} more are declared at {position:,}"
            raise Damaged("torn", detail)

    def fill(self, view: memoryview, position: int) -> None:
        """Read as much as the view holds; Damaged if the file became shorter in the meantime."""
        filled = 0
        # one call returns at most 2 GB on Linux, and less after a signal
        while filled < len(view):
            at = self.start + position + filled
            try:
                count = os.preadv(self.descriptor, [view[filled:]], at)
            except OSError as error:
                detail = f"cannot be read at byte {at:,}: {error.strerror}"
                raise Damaged("unreadable", detail) from error
            if not count:
                detail = f"ends at byte {at:,}: it became shorter while it was read"
                raise Damaged("torn", detail)
            filled += count

    def reader(self) -> io.BufferedReader:
        """Return a buffered file object of the slice."""
        return io.BufferedReader(self.part(0, self.size), BUFFER)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def open_file(path: Path) -> Iterator[FileSlice]:
    """Open a regular file as a slice of its whole length; anything else is refused unopened."""
    try:
        _refuse_special(path.stat().st_mode)
        # without O_NONBLOCK, opening a FIFO that has no writer would wait forever
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged("unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        # the path may have been replaced between stat and open
        _refuse_special(facts.st_mode)
        yield FileSlice(descriptor, 0, facts.st_size)
    finally:
        os.close(descriptor)


def _refuse_special(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise Damaged("unreadable", f"is {special_name(mode)}, not a file")


def special_name(mode: int) -> str:
    """Name the kind of a special file for a message: `a device`."""
    return FILE_KINDS.get(stat.S_IFMT(mode), "something else")


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON strictly about doubled keys; NaN is accepted, trainer_state.json holds it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            doubled = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise Damaged("duplicate", f"{what} names {doubled[:80]!r} more than once")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise Damaged("limit", f"{what} is nested too deep") from None
    except ValueError as error:
        raise Damaged("malformed", f"{what} is not JSON: {str(error)[:120]}") from None
