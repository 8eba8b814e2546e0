"""Plain pickles, and the stream of pickles and raw storages that torch.save wrote before 1.6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepguard.records.verification import Role
from stepguard.verification import roles
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.file_layout import FileLayout
from stepguard.verification.format_entry import (
    TORCH_SHARED_SUFFIXES,
    TORCH_SUFFIXES,
    FileFormat,
)
from stepguard.verification.pickle_contents import PickledTensor
from stepguard.verification.pickle_stream import PickleReader, is_legacy
from stepguard.verification.pickle_tensors import (
    add_pickle,
    add_tensor,
    hostile_refused,
    names_reported,
)
from stepguard.verification.pickle_values import StorageRecord, TensorRecord

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
    role = roles.of_tensor(context, tensor.name, found.dtype)
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
