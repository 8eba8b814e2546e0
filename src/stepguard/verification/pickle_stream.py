"""Read a whole pickle: one stream, or the five pickles and raw storages of torch.save before 1.6.

A pickle can hold further pickles as byte strings (`torch.storage._load_from_bytes` loads them), so
the names that those refer to are collected as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stepguard.verification import dtype_names
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_globals import storage_of
from stepguard.verification.pickle_machine import PickleMachine, PickleReferences
from stepguard.verification.pickle_values import Global, PickledBytes, StorageRecord

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the old format: the magic number, in protocol 2."""
DEEPEST_NESTED = 3


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where the bytes of a storage lie in the file."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LegacyStream:
    """The value of an old torch.save, and where its storages lie."""

    value: Any
    storages: dict[str, ByteRange]


class PickleReader:
    """Reads the pickles of one file, and those that they hold as byte strings."""

    def __init__(self, source: FileSlice, *, scripted: bool = False, depth: int = 0) -> None:
        self._source = source
        self._file = source.reader()
        self._depth = depth
        self.storages: dict[str, StorageRecord] = {}
        """Every storage that the pickles name, used or not."""
        self.seen = PickleReferences(scripted=scripted)
        self.nested: dict[int, LegacyStream] = {}
        """Pickles inside the pickle, by the identity of their bytes."""

    def value(self) -> Any:
        """Return the value of a file that is one pickle."""
        found = self._next()
        self._read_nested()
        # torch.load goes on reading if the first value equals its magic number
        left = self._source.size - self._file.tell()
        if left:
            raise Damaged(
                "format", f"{left:,} bytes follow the end of the pickle; they were not read"
            )
        return found

    def legacy(self) -> LegacyStream:
        """Read the pickles of an old torch.save and find its storages, which follow them."""
        magic = self._next()
        protocol = self._next()
        self._next()  # byte order and sizes of the machine that wrote it
        value = self._next()
        keys = self._next()
        if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not isinstance(keys, list):
            raise Damaged("malformed", "its first pickles are not those of torch.save")
        ranges = self._storage_ranges(keys)
        self._read_nested()
        return LegacyStream(value, ranges)

    def _next(self) -> Any:
        return PickleMachine(self._source, self._file, self._persistent, self.seen).load()

    def _persistent(self, pid: Any) -> Any:
        # the old format names the class and the source text of every module
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            _, kind, file, text = pid
            if (
                isinstance(kind, Global)
                and isinstance(file, str | None)
                and isinstance(text, str | None)
            ):
                return kind
        storage = storage_of(pid)
        return self.storages.setdefault(storage.key, storage)

    def _storage_ranges(self, keys: list[Any]) -> dict[str, ByteRange]:
        ranges: dict[str, ByteRange] = {}
        at = self._file.tell()
        for key in keys:
            storage = self.storages.get(key) if isinstance(key, str) else None
            if storage is None or key in ranges:
                raise Damaged(
                    "malformed",
                    f"its list of storages names {str(key)[:40]!r}, which is unknown or doubled",
                )
            count = int.from_bytes(self._source.exactly(at, 8), "little", signed=True)
            if count != storage.elements:
                raise Damaged(
                    "torn",
                    f"storage {key} has {count:,} elements where the pickle says "
                    f"{storage.elements:,}",
                )
            size = count * dtype_names.SIZES[storage.dtype]
            self._source.part(at + 8, size)
            ranges[key] = ByteRange(self._source.start + at + 8, size)
            at += 8 + size
        if at < self._source.size:
            left = self._source.size - at
            raise Damaged("format", f"{left:,} bytes follow the last storage; they were not read")
        return ranges

    def _read_nested(self) -> None:
        """Read byte strings that torch would load as pickles of their own, used or not."""
        if self.seen.nested and self._depth >= DEEPEST_NESTED:
            raise Damaged("limit", f"pickles are nested more than {DEEPEST_NESTED} deep")
        for raw in self.seen.nested.values():
            with _slice_of(self._source, raw) as inner:
                if not is_legacy(inner):
                    raise Damaged(
                        "format",
                        "it holds bytes that torch would load, and that are not an old "
                        "torch.save; not followed",
                    )
                reader = PickleReader(inner, depth=self._depth + 1)
                try:
                    self.nested[id(raw)] = reader.legacy()
                finally:
                    for name, called in reader.seen.names.items():
                        self.seen.names[name] = self.seen.names.get(name, False) or called


def is_legacy(source: FileSlice) -> bool:
    return source.at(0, len(LEGACY_START)) == LEGACY_START


@contextmanager
def _slice_of(source: FileSlice, raw: PickledBytes) -> Iterator[FileSlice]:
    """Open a byte string where it lies in the file, or a copy of one that protocol 2 encoded."""
    # a FileSlice reads by descriptor, so bytes that are only in memory need a file of their own
    if raw.data is None or raw.start >= 0:
        yield FileSlice(source.descriptor, raw.start, raw.size, source.path)
        return
    with tempfile.TemporaryFile() as copy:
        copy.write(raw.data)
        copy.flush()
        yield FileSlice(copy.fileno(), 0, raw.size, source.path)
