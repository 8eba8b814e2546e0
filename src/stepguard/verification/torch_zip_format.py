"""Files of torch.save since 1.6: a zip with a pickle and one record for each storage."""

from __future__ import annotations

from typing import Any

from stepguard.records.verification import Role
from stepguard.report.phrases import first_few
from stepguard.verification import zip_directory
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.file_layout import ChecksumRange, FileLayout
from stepguard.verification.format_entry import (
    TORCH_SHARED_SUFFIXES,
    TORCH_SUFFIXES,
    FileFormat,
)
from stepguard.verification.pickle_contents import PickleContents
from stepguard.verification.pickle_opcodes import Globals
from stepguard.verification.pickle_stream import ByteRange, read_value
from stepguard.verification.pickle_tensors import add_pickle, refuse_hostile
from stepguard.verification.zip_directory import ZipRecord

SIGNATURE = b"PK"
PICKLE = "data.pkl"
STORAGES = "data/"


def read_zip(
    source: FileSlice, layout: FileLayout, role: Role | None, prefix: str = ""
) -> PickleContents:
    """Fill the layout from the pickle and the records of its storages, each with its CRC."""
    records = zip_directory.records(source)
    pickle = _pickle_record(records)
    # storages are written as they lie in memory, in the byte order of the machine
    if "byteorder" in records and source.at(records["byteorder"].start, 16).strip() == b"big":
        raise Damaged(
            "format", "it was saved on a big-endian machine, which is not read; save it again here"
        )
    _add_checksums(source, layout, records)
    value, globals_seen = _read_record(source, pickle)
    storages: dict[str, ByteRange] = {}
    # torch names the record of a storage by the key in its persistent id
    for key, record in records.items():
        if key.startswith(STORAGES):
            start = source.start + zip_directory.stored(record).start
            storages[key.removeprefix(STORAGES)] = ByteRange(start, record.size)
    return add_pickle(layout, value, globals_seen, storages, role, prefix)


def _pickle_record(records: dict[str, ZipRecord]) -> ZipRecord:
    if PICKLE not in records:
        raise Damaged(
            "format",
            f"the zip holds no {PICKLE} but {first_few(sorted(records), 5)}: "
            f"it is not from torch.save",
        )
    return records[PICKLE]


def _read_record(source: FileSlice, record: ZipRecord) -> tuple[Any, Globals]:
    stored = zip_directory.stored(record)
    return read_value(source.part(stored.start, stored.size))


def _add_checksums(source: FileSlice, layout: FileLayout, records: dict[str, ZipRecord]) -> None:
    stored = [record for record in records.values() if record.packed is None]
    # with CRCs switched off, torch writes 0 for every record
    if not any(record.crc for record in stored if record.size):
        layout.problems.add(
            "checksum",
            "was saved without checksums (torch.serialization.set_crc32_options), so flipped bits "
            "cannot be found",
            severity="warning",
        )
        return
    for record in stored:
        start = source.start + record.start
        layout.checksums.append(ChecksumRange(start, record.size, record.name, "crc32", record.crc))


def _content(source: FileSlice) -> Any:
    records = zip_directory.records(source)
    value, globals_seen = _read_record(source, _pickle_record(records))
    refuse_hostile(globals_seen)
    return value


TORCH_ZIP = FileFormat(
    name="torch zip",
    matches=lambda source, _: source.at(0, 2) == SIGNATURE,
    read=read_zip,
    read_content=_content,
    suffixes=TORCH_SUFFIXES,
    shared_suffixes=TORCH_SHARED_SUFFIXES,
    starts=(b"PK\x03\x04",),
)
