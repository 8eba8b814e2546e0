"""Plain pickles, and the stream of pickles and raw storages that torch.save wrote before 1.6."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from stepguard.records.checks import Role
from stepguard.report.phrases import first_few
from stepguard.verification import bounded_file, pickle_machine
from stepguard.verification.bounded_file import Damaged, FileSlice
from stepguard.verification.pickle_globals import (
    ArrayRecord,
    StorageRecord,
    TensorRecord,
    Trust,
    trust,
)
from stepguard.verification.pickle_machine import (
    ByteRange,
    PickleContents,
    PickledTensor,
    PickleReader,
    PickleReferences,
    is_legacy,
)
from stepguard.verification.reading import FileLayout
from stepguard.verification.scan import TORCH_SHARED_SUFFIXES, TORCH_SUFFIXES, FileFormat

# --- Add the value of a pickle to a file layout: offsets of its tensors, names not on the list.


NEEDLESS = "which a checkpoint of tensors does not need"


def add_pickle(
    layout: FileLayout,
    value: Any,
    storages: dict[str, ByteRange],
    role: Role | None,
    prefix: str = "",
) -> PickleContents:
    """Add everything that the value of a pickle says: rates, numbers and tensors."""
    contents = pickle_machine.walk(value, layout.problems, role)
    layout.add_contents(contents)
    for tensor in contents.tensors:
        add_tensor(layout, tensor, storages, prefix)
    return contents


@contextmanager
def names_reported(layout: FileLayout, seen: PickleReferences) -> Iterator[None]:
    """Report every name that is not on the list, also where reading stops before the end."""
    try:
        yield
    finally:
        names = _by_trust(seen)
        for hostile in names.get("hostile", ()):
            layout.problems.add(
                "hostile",
                f"names {hostile}, {NEEDLESS}; loading it with pickle could run code; "
                "nothing was run",
            )
        for called_class in names.get("calls", ()):
            layout.problems.add(
                "global",
                f"names {called_class}, {NEEDLESS}; loading it with pickle would call it with "
                "arguments from the file. Where it is a class of your own, save its value instead",
            )
        unknown = names.get("unknown")
        if unknown:
            layout.problems.add(
                "global",
                f"names {first_few(unknown, 5)}, {NEEDLESS}; loading it with pickle would import "
                "and run code that is not on the list of stepguard. Where it is your own, save "
                "the state_dict instead of the object",
            )


@contextmanager
def hostile_refused(seen: PickleReferences) -> Iterator[None]:
    """Raise Damaged for a pickle that was made to run code."""
    try:
        yield
    finally:
        hostile = _by_trust(seen).get("hostile")
        if hostile:
            raise Damaged(
                "hostile",
                f"it names {first_few(hostile, 5)}, {NEEDLESS}; loading it with pickle could run "
                "code",
            )


def _by_trust(seen: PickleReferences) -> dict[Trust, list[str]]:
    names: dict[Trust, list[str]] = {}
    for name, called in seen.names.items():
        names.setdefault(trust(name, called=called, scripted=seen.scripted), []).append(str(name))
    return names


def add_tensor(
    layout: FileLayout, tensor: PickledTensor, storages: dict[str, ByteRange], prefix: str = ""
) -> None:
    """Add a tensor with its bytes in the file, unless those are in a nested pickle."""
    name = f"{prefix}{tensor.name}"
    if not tensor.name:
        name = prefix.rstrip("/")
    record = tensor.record
    if isinstance(record, ArrayRecord):
        _add_array(layout, name, tensor.role, record)
    elif isinstance(record, TensorRecord) and record.storage.nested is None:
        _add_view(layout, name, tensor.role, record, storages)


def _add_array(layout: FileLayout, name: str, role: Role, array: ArrayRecord) -> None:
    if array.raw is None or array.raw.start < 0 or not array.dtype:
        return
    size = math.prod(array.shape) * bounded_file.SIZES[array.dtype]
    if size != array.raw.size:
        layout.problems.add(
            "malformed", f"has {array.raw.size:,} bytes, its shape needs {size:,}", tensor=name
        )
        return
    start = array.raw.start
    layout.add_tensor(name, role, array.dtype, array.shape, start, start, size)


def _add_view(
    layout: FileLayout,
    name: str,
    role: Role,
    tensor: TensorRecord,
    storages: dict[str, ByteRange],
) -> None:
    storage = tensor.storage
    size = storage.elements * bounded_file.SIZES[storage.dtype]
    where = storages.get(storage.key)
    if where is None:
        # torch writes no record for a storage without bytes
        if size:
            detail = f"its storage {storage.key} is not in the file"
            layout.problems.add("missing", detail, tensor=name, role=role)
        return
    if where.size != size:
        detail = (
            f"its storage {storage.key} has {where.size:,} bytes in the file and "
            f"{size:,} in the pickle"
        )
        layout.problems.add("torn", detail, tensor=name, role=role)
        return
    width = bounded_file.SIZES[tensor.dtype]
    extent = _extent(tensor)
    if extent is None or (tensor.offset + extent) * width > where.size:
        detail = (
            f"shape {tensor.shape[:8]} at offset {tensor.offset} does not fit into its "
            f"storage of {where.size:,} bytes"
        )
        layout.problems.add("malformed", detail, tensor=name, role=role)
        return
    start = where.start + tensor.offset * width
    layout.add_tensor(name, role, tensor.dtype, tensor.shape, start, where.start, extent * width)


def _extent(tensor: TensorRecord) -> int | None:
    """Count elements from the first to the last one; None for sizes that no tensor has."""
    if len(tensor.shape) != len(tensor.stride):
        return None
    if min(tensor.offset, *tensor.shape, *tensor.stride, 0) < 0:
        return None
    if 0 in tensor.shape:
        return 0
    # as torch's as_strided: dimensions may overlap, a stride of 0 repeats one element
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))


# --- Plain pickles, and the stream of pickles and raw storages that torch.save wrote before 1.6.


SUFFIXES = frozenset({".pkl", ".pickle"})
PROTOCOL = 0x80
"""The PROTO opcode, with which every pickle of protocol 2 or later begins."""
OLD_STARTS = frozenset(b"(])}cl].IFNSVd")
"""First bytes of a pickle of protocol 0 or 1, which has no header."""


def _is_pickle(source: FileSlice, suffix: str) -> bool:
    first = source.at(0, 1)
    if not first:
        return False
    if first[0] == PROTOCOL:
        return True
    # such a first byte may begin anything, so the suffix must say that it is a checkpoint
    known = SUFFIXES | TORCH_SUFFIXES | TORCH_SHARED_SUFFIXES
    return suffix in known and first[0] in OLD_STARTS


def _read_plain(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    reader = PickleReader(source)
    with names_reported(layout, reader.seen):
        value = reader.value()
    contents = add_pickle(layout, value, {}, role)
    for tensor in contents.tensors:
        record = tensor.record
        if isinstance(record, TensorRecord) and record.storage.nested is not None:
            _read_nested(layout, tensor, record, reader)


def _read_nested(
    layout: FileLayout, tensor: PickledTensor, record: TensorRecord, reader: PickleReader
) -> None:
    """Add a tensor whose storage a plain pickle holds as an old torch.save of its own."""
    raw = record.storage.nested
    if raw is None or raw.start < 0:
        layout.problems.add(
            "format",
            "is written in protocol 2 and was not scanned",
            tensor=tensor.name,
            severity="warning",
        )
        return
    stream = reader.nested[id(raw)]
    storage = stream.value
    if not isinstance(storage, StorageRecord):
        raise Damaged("malformed", f"{tensor.name} is made of a {type(storage).__name__}")
    found = replace(record, storage=storage, dtype=record.dtype or storage.dtype)
    # the role was guessed before the element type was known
    context = None if tensor.role in ("parameter", "buffer") else tensor.role
    role = pickle_machine.of_tensor(context, tensor.name, found.dtype)
    add_tensor(layout, PickledTensor(tensor.name, role, found), stream.storages)


def _plain_content(source: FileSlice) -> Any:
    reader = PickleReader(source)
    with hostile_refused(reader.seen):
        return reader.value()


def _read_legacy(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    reader = PickleReader(source)
    with names_reported(layout, reader.seen):
        stream = reader.legacy()
    add_pickle(layout, stream.value, stream.storages, role)


def _legacy_content(source: FileSlice) -> Any:
    reader = PickleReader(source)
    with hostile_refused(reader.seen):
        return reader.legacy().value


PICKLE = FileFormat(
    name="pickle",
    matches=_is_pickle,
    read=_read_plain,
    read_content=_plain_content,
    shared_suffixes=SUFFIXES,
    starts=(b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
)
TORCH_LEGACY = FileFormat(
    name="torch legacy",
    matches=lambda source, _: is_legacy(source),
    read=_read_legacy,
    read_content=_legacy_content,
    suffixes=TORCH_SUFFIXES,
    shared_suffixes=TORCH_SHARED_SUFFIXES,
)
