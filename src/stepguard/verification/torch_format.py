"""Files of torch.save: the zip of today, the stream of pickles before it, and plain pickles."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard.records.verification import Role
from stepguard.verification import (
    dtype_names,
    limits,
    pickle_contents,
    pickle_globals,
    roles,
    zip_format,
)
from stepguard.verification.bounded_file import Window, opened
from stepguard.verification.damage import Damaged, Notes, listed
from stepguard.verification.file_layout import Block, Layout, elements
from stepguard.verification.pickle_constructors import reference, storage_of
from stepguard.verification.pickle_contents import Contents, Leaf
from stepguard.verification.pickle_values import ArrayRecord, Global, Raw, Storage, TensorRecord
from stepguard.verification.pickle_vm import read_pickle

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
DEEPEST_NESTED = 3
NEEDLESS = "which a checkpoint of tensors does not need"
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


Names = dict[Global, bool]
"""What a pickle refers to, and whether it calls it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the bytes of a storage lie in the file."""

    start: int
    size: int


def read_zip(window: Window, layout: Layout, role: Role | None, prefix: str = "") -> Contents:
    """A zip of torch.save: a pickle and one record a storage, each with its CRC."""
    found = zip_format.records(window, layout.notes)
    if "data.pkl" not in found:
        raise Damaged(
            "format",
            f"the zip holds no data.pkl but {listed(sorted(found))}: it is not from torch.save",
        )
    if "byteorder" in found and window.at(found["byteorder"].start, 16).strip() == b"big":
        raise Damaged(
            "format", "it was saved on a big-endian machine, which is not read; save it again here"
        )
    _checksums(window, layout, found)
    pickle = zip_format.stored(found["data.pkl"])
    value, names = read_value(window.window(pickle.start, pickle.size))
    report_names(layout, names)
    held = pickle_contents.walk(value, layout.notes, role)
    places = {
        key.removeprefix("data/"): Stored(
            window.start + zip_format.stored(record).start, record.size
        )
        for key, record in found.items()
        if key.startswith("data/")
    }
    layout.take(held)
    place(layout, held.leaves, places, prefix)
    return held


def _checksums(window: Window, layout: Layout, found: dict[str, zip_format.Record]) -> None:
    kept = [record for record in found.values() if record.packed is None]
    blocks = [
        Block(window.start + record.start, record.size, record.name, "crc32", record.crc)
        for record in kept
    ]
    if not any(record.crc for record in kept if record.size):
        layout.notes.add(
            "checksum",
            "was saved without checksums (torch.serialization.set_crc32_options), so flipped bits "
            "cannot be found",
            severity="warning",
        )
        blocks = []
    layout.blocks.extend(blocks)


def read_stream(window: Window, layout: Layout, role: Role | None, prefix: str = "") -> Contents:
    """A pickle, or the four pickles and raw storages that torch.save wrote before 1.6."""
    if window.at(0, len(LEGACY_START)) == LEGACY_START:
        return _read_legacy(window, layout, role, prefix)
    layout.format = "pickle"
    value, names = read_value(window)
    report_names(layout, names)
    if window.left:
        layout.notes.add(
            "torn", f"{window.left:,} bytes follow the end of the pickle", severity="warning"
        )
    held = pickle_contents.walk(value, layout.notes, role)
    layout.take(held)
    place(layout, held.leaves, {}, prefix)
    for leaf in held.leaves:
        if isinstance(leaf.record, TensorRecord) and leaf.record.storage.nested is not None:
            _read_nested(window, layout, leaf, leaf.record.storage.nested)
    return held


def _read_nested(window: Window, layout: Layout, leaf: Leaf, raw: Raw) -> None:
    """A storage that a plain pickle holds as a torch.save of its own (old format only; nothing
    deeper).
    """
    if raw.start < 0:
        layout.notes.add(
            "format",
            "is written in protocol 2 and was not scanned",
            tensor=leaf.name,
            severity="warning",
        )
        return
    value, _, places = _legacy_parts(Window(window.descriptor, raw.start, raw.size, window.path))
    if not isinstance(value, Storage) or not isinstance(leaf.record, TensorRecord):
        raise Damaged("malformed", f"{leaf.name} is made of a {type(value).__name__}")
    tensor = leaf.record
    record = TensorRecord(
        value,
        tensor.dtype or value.dtype,
        tensor.offset,
        tensor.shape,
        tensor.stride,
        tensor.parameter,
    )
    role = roles.of_tensor(
        leaf.role if leaf.role not in ("parameter", "buffer") else None, leaf.name, record.dtype
    )
    place(layout, [Leaf(leaf.name, role, record)], places)


def _read_legacy(window: Window, layout: Layout, role: Role | None, prefix: str) -> Contents:
    layout.format = "torch legacy"
    value, names, places = _legacy_parts(window)
    report_names(layout, names)
    held = pickle_contents.walk(value, layout.notes, role)
    layout.take(held)
    place(layout, held.leaves, places, prefix)
    return held


def _legacy_parts(window: Window, depth: int = 0) -> tuple[Any, Names, dict[str, Stored]]:
    names: Names = {}
    nested = Nested()
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return pid[1]
        storage = storage_of(pid)
        return storages.setdefault(storage.key, storage)

    magic, protocol, _, value, keys = (
        read_pickle(window, persistent, names, nested.reference) for _ in range(5)
    )
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not isinstance(keys, list):
        raise Damaged("malformed", "its first pickles are not those of torch.save")
    places = _legacy_storages(window, keys, storages)
    nested.take_names(window, names, depth)
    return value, names, places


def _legacy_storages(
    window: Window, keys: list[Any], storages: dict[str, Storage]
) -> dict[str, Stored]:
    places: dict[str, Stored] = {}
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in places:
            raise Damaged(
                "malformed",
                f"its list of storages names {str(key)[:40]!r}, which is unknown or doubled",
            )
        count = int.from_bytes(window.read(8), "little", signed=True)
        if count != storage.elements:
            raise Damaged(
                "torn",
                f"storage {key} has {count:,} elements where the pickle says {storage.elements:,}",
            )
        size = count * dtype_names.SIZES[storage.dtype]
        places[key] = Stored(window.start + window.tell(), size)
        window.skip(size)
    return places


def read_value(window: Window) -> tuple[Any, Names]:
    """The value of a pickle, and every name it refers to."""
    names: Names = {}
    nested = Nested()
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> Storage:
        storage = storage_of(pid)
        return storages.setdefault(storage.key, storage)

    value = read_pickle(window, persistent, names, nested.reference)
    nested.take_names(window, names)
    return value, names


class Nested:
    """Byte strings that torch would load as pickles of their own
    (`torch.storage._load_from_bytes`), used or not.
    """

    def __init__(self) -> None:
        self._found: list[Raw] = []

    def reference(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """As `shapes.reference`."""
        value = reference(what, arguments)
        if isinstance(value, Storage) and value.nested is not None:
            self._found.append(value.nested)
        return value

    def take_names(self, window: Window, names: Names, depth: int = 0) -> None:
        """Every name that they refer to, as if it stood in the stream itself."""
        if self._found and depth >= DEEPEST_NESTED:
            raise Damaged("limit", f"pickles are nested more than {DEEPEST_NESTED} deep")
        for raw in self._found:
            with _bytes_of(window, raw) as inner:
                if inner.at(0, len(LEGACY_START)) != LEGACY_START:
                    raise Damaged(
                        "format",
                        "it holds bytes that torch would load, and that are no old torch.save; not "
                        "followed",
                    )
                for name, called in _legacy_parts(inner, depth + 1)[1].items():
                    names[name] = names.get(name, False) or called


@contextmanager
def _bytes_of(window: Window, raw: Raw) -> Iterator[Window]:
    """A byte string where it lies in the file, or the copy of one that protocol 2 wrote as a text."""
    if raw.data is None or raw.start >= 0:
        yield Window(window.descriptor, raw.start, raw.size, window.path)
        return
    with tempfile.TemporaryFile() as copy:
        copy.write(raw.data)
        copy.flush()
        yield Window(copy.fileno(), 0, raw.size, window.path)


def read_inert(path: Path) -> Any:
    """What a file of torch.save holds, as plain containers and records. Nothing of it is run or
    imported.

    Raises Damaged for what cannot be read, and for a pickle that was made to run code.
    """
    with opened(path) as window:
        if window.at(0, 2) == b"PK":
            found = zip_format.records(window, Notes(str(path)))
            if "data.pkl" not in found:
                raise Damaged("format", "the zip holds no data.pkl: it is not from torch.save")
            pickle = zip_format.stored(found["data.pkl"])
            value, names = read_value(window.window(pickle.start, pickle.size))
        elif window.at(0, len(LEGACY_START)) == LEGACY_START:
            value, names, _ = _legacy_parts(window)
        else:
            value, names = read_value(window)
    hostile = [
        str(name)
        for name, called in names.items()
        if pickle_globals.trust(name, called=called) == "hostile"
    ]
    if hostile:
        raise Damaged(
            "hostile",
            f"it names {listed(hostile)}, {NEEDLESS}; loading it with pickle could run code",
        )
    return value


def report_names(layout: Layout, names: Names) -> None:
    """Every name that is not one a checkpoint needs, by what it would do."""
    trusted: dict[pickle_globals.Trust, list[str]] = {}
    for name, called in names.items():
        trusted.setdefault(pickle_globals.trust(name, called=called), []).append(str(name))
    for runs in trusted.get("hostile", ()):
        detail = f"names {runs}, {NEEDLESS}; loading it with pickle could run code; nothing was run"
        layout.notes.add("hostile", detail)
    for made in trusted.get("calls", ()):
        detail = (
            f"names {made}, {NEEDLESS}; loading it with pickle would call it with arguments from "
            f"the file. Where it is "
            "a class of your own, save its value instead"
        )
        layout.notes.add("global", detail)
    unknown = trusted.get("unknown")
    if unknown:
        detail = (
            f"names {listed(unknown)}, {NEEDLESS}; loading it with pickle would import them; "
            f"here they are records"
        )
        layout.notes.add("global", detail, severity="warning")


def place(layout: Layout, leaves: list[Leaf], places: dict[str, Stored], prefix: str = "") -> None:
    """Give every tensor its bytes in the file."""
    sizes: dict[str, int] = {}
    for leaf in leaves:
        name = f"{prefix}{leaf.name}" if leaf.name or not prefix else prefix.rstrip("/")
        if isinstance(leaf.record, ArrayRecord):
            _place_array(layout, name, leaf, leaf.record)
        elif isinstance(leaf.record, TensorRecord) and leaf.record.storage.nested is None:
            _place_tensor(layout, name, leaf, leaf.record, places, sizes)


def _place_array(layout: Layout, name: str, leaf: Leaf, array: ArrayRecord) -> None:
    if array.raw is None or array.raw.start < 0 or not array.dtype:
        return
    size = elements(array.shape) * dtype_names.SIZES[array.dtype]
    if size != array.raw.size:
        layout.notes.add(
            "malformed", f"has {array.raw.size:,} bytes, its shape needs {size:,}", tensor=name
        )
        return
    layout.look(name, leaf.role, array.dtype, array.shape, array.raw.start, array.raw.start, size)


def _place_tensor(
    layout: Layout,
    name: str,
    leaf: Leaf,
    tensor: TensorRecord,
    places: dict[str, Stored],
    sizes: dict[str, int],
) -> None:
    storage, width = tensor.storage, dtype_names.SIZES[tensor.dtype]
    bytes_in_storage = storage.elements * dtype_names.SIZES[storage.dtype]
    where = places.get(storage.key)
    if where is None:
        if bytes_in_storage:
            layout.notes.add(
                "missing",
                f"its storage {storage.key} is not in the file",
                tensor=name,
                role=leaf.role,
            )
        return
    if where.size != bytes_in_storage:
        detail = (
            f"its storage {storage.key} has {where.size:,} bytes in the file and "
            f"{bytes_in_storage:,} in the pickle"
        )
        layout.notes.add("torn", detail, tensor=name, role=leaf.role)
        return
    extent = _extent(tensor)
    if extent is None or (tensor.offset + extent) * width > where.size:
        detail = (
            f"shape {tensor.shape[:8]} at offset {tensor.offset} does not fit into its "
            f"storage of {where.size:,} bytes"
        )
        layout.notes.add("malformed", detail, tensor=name, role=leaf.role)
        return
    start = where.start + tensor.offset * width
    layout.look(name, leaf.role, tensor.dtype, tensor.shape, start, where.start, extent * width)


def _extent(tensor: TensorRecord) -> int | None:
    """Elements from the first to the last one, or None for sizes that no tensor has."""
    if (
        len(tensor.shape) != len(tensor.stride)
        or len(tensor.shape) > limits.LARGEST_DIMENSIONS
        or tensor.offset < 0
    ):
        return None
    if any(n < 0 for n in tensor.shape) or any(n < 0 for n in tensor.stride):
        return None
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
