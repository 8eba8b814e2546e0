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
from stepguard.verification.pickle_constructors import build_value, storage_of
from stepguard.verification.pickle_opcodes import Globals
from stepguard.verification.pickle_values import PickledBytes, StorageRecord
from stepguard.verification.pickle_vm import read_pickle

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
    """The value of an old torch.save, the names it refers to, and where its storages lie."""

    value: Any
    globals: Globals
    storages: dict[str, ByteRange]


def is_legacy(source: FileSlice) -> bool:
    return source.at(0, len(LEGACY_START)) == LEGACY_START


def read_value(source: FileSlice) -> tuple[Any, Globals]:
    """Return the value of a pickle, and every name it refers to."""
    globals_seen: Globals = {}
    nested = NestedPickles()
    storages: dict[str, StorageRecord] = {}

    def persistent(pid: Any) -> StorageRecord:
        storage = storage_of(pid)
        return storages.setdefault(storage.key, storage)

    value = read_pickle(source, persistent, globals_seen, nested.build)
    nested.add_globals(source, globals_seen)
    return value, globals_seen


def read_legacy(source: FileSlice, depth: int = 0) -> LegacyStream:
    """Read the pickles of an old torch.save and find its storages, which follow them."""
    globals_seen: Globals = {}
    nested = NestedPickles()
    storages: dict[str, StorageRecord] = {}

    def persistent(pid: Any) -> Any:
        # the old format names the class and the source text of every module
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return pid[1]
        storage = storage_of(pid)
        return storages.setdefault(storage.key, storage)

    def read_next() -> Any:
        return read_pickle(source, persistent, globals_seen, nested.build)

    magic = read_next()
    protocol = read_next()
    read_next()  # byte order and sizes of the machine that wrote it
    value = read_next()
    keys = read_next()
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not isinstance(keys, list):
        raise Damaged("malformed", "its first pickles are not those of torch.save")
    ranges = _legacy_storages(source, keys, storages)
    nested.add_globals(source, globals_seen, depth)
    return LegacyStream(value, globals_seen, ranges)


def _legacy_storages(
    source: FileSlice, keys: list[Any], storages: dict[str, StorageRecord]
) -> dict[str, ByteRange]:
    """Find the raw storages: each is preceded by its number of elements, in eight bytes."""
    ranges: dict[str, ByteRange] = {}
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in ranges:
            raise Damaged(
                "malformed",
                f"its list of storages names {str(key)[:40]!r}, which is unknown or doubled",
            )
        count = int.from_bytes(source.read(8), "little", signed=True)
        if count != storage.elements:
            raise Damaged(
                "torn",
                f"storage {key} has {count:,} elements where the pickle says {storage.elements:,}",
            )
        size = count * dtype_names.SIZES[storage.dtype]
        ranges[key] = ByteRange(source.start + source.tell(), size)
        source.skip(size)
    return ranges


class NestedPickles:
    """Byte strings of a stream that torch would load as pickles of their own, used or not."""

    def __init__(self) -> None:
        self._found: list[PickledBytes] = []

    def build(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """Build a value, and remember it if it is a nested pickle."""
        value = build_value(what, arguments)
        if isinstance(value, StorageRecord) and value.nested is not None:
            self._found.append(value.nested)
        return value

    def add_globals(self, source: FileSlice, globals_seen: Globals, depth: int = 0) -> None:
        """Add every name that they refer to, as if it stood in the stream itself."""
        if self._found and depth >= DEEPEST_NESTED:
            raise Damaged("limit", f"pickles are nested more than {DEEPEST_NESTED} deep")
        for raw in self._found:
            with _slice_of(source, raw) as inner:
                if not is_legacy(inner):
                    raise Damaged(
                        "format",
                        "it holds bytes that torch would load, and that are not an old "
                        "torch.save; not followed",
                    )
                for name, called in read_legacy(inner, depth + 1).globals.items():
                    globals_seen[name] = globals_seen.get(name, False) or called


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
