"""Files of torch.save since 1.6: a zip with a pickle and one record for each storage."""

from __future__ import annotations

import zlib
from typing import Any

from stepguard.records.verification import Role
from stepguard.report.phrases import first_few
from stepguard.verification import dtype_names, limits, zip_directory
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.file_layout import ChecksumRange, FileLayout
from stepguard.verification.format_entry import (
    TORCH_SHARED_SUFFIXES,
    TORCH_SUFFIXES,
    FileFormat,
)
from stepguard.verification.pickle_contents import PickleContents
from stepguard.verification.pickle_stream import ByteRange, PickleReader
from stepguard.verification.pickle_tensors import add_pickle, hostile_refused, names_reported
from stepguard.verification.pickle_values import TensorRecord
from stepguard.verification.zip_directory import ZipRecord

SIGNATURE = b"PK\x03\x04"
PICKLE = "data.pkl"
STORAGES = "data/"
SCRIPTED = "constants.pkl"
"""Its presence makes torch.load hand the archive to torch.jit.load."""
RUN_ON_LOAD = b"__setstate__"


def read_zip(
    source: FileSlice, layout: FileLayout, role: Role | None, prefix: str = ""
) -> PickleContents:
    """Fill the layout from the pickle and the records of its storages, each with its CRC."""
    records = zip_directory.records(source)
    reader = _pickle_reader(source, records)
    # storages are written as they lie in memory, in the byte order of the machine
    order = records.get("byteorder")
    if order is not None and source.at(zip_directory.stored(order).start, 16).strip() == b"big":
        raise Damaged(
            "format", "it was saved on a big-endian machine, which is not read; save it again here"
        )
    _add_checksums(source, layout, records)
    if reader.seen.scripted:
        _check_script(source, layout, records)
    with names_reported(layout, reader.seen):
        value = reader.value()
    storages: dict[str, ByteRange] = {}
    # torch names the record of a storage by the key in its persistent id
    for key, record in records.items():
        if key.startswith(STORAGES):
            start = source.start + zip_directory.stored(record).start
            storages[key.removeprefix(STORAGES)] = ByteRange(start, record.size)
    contents = add_pickle(layout, value, storages, role, prefix)
    shown = {tensor.record.storage.key for tensor in contents.tensors
             if isinstance(tensor.record, TensorRecord)}  # fmt: skip
    for key, storage in reader.storages.items():
        size = storage.elements * dtype_names.SIZES[storage.dtype]
        held = storages[key].size if key in storages else 0
        # torch reads each one that the pickle names, whether a tensor needs it or not
        if key not in shown and held != size:
            layout.problems.add(
                "torn", f"storage {key} has {held:,} bytes in the file and {size:,} in the pickle"
            )
    return contents


def _pickle_reader(source: FileSlice, records: dict[str, ZipRecord]) -> PickleReader:
    if PICKLE not in records:
        raise Damaged(
            "format",
            f"the zip holds no {PICKLE} but {first_few(sorted(records), 5)}: "
            f"it is not from torch.save",
        )
    record = zip_directory.stored(records[PICKLE])
    return PickleReader(source.part(record.start, record.size), scripted=SCRIPTED in records)


def _check_script(source: FileSlice, layout: FileLayout, records: dict[str, ZipRecord]) -> None:
    """Report code that loading a TorchScript archive runs: its operators can write files."""
    for key, record in records.items():
        # archives of torch 1.3 and before name the record of their code in here
        if key.lower() == "model.json":
            layout.problems.add(
                "global", f"{record.name} is of a TorchScript archive older than torch 1.4"
            )
        if not key.lower().startswith("code/"):
            continue
        packed = source.exactly(record.start, min(record.end - record.start, limits.LONGEST_TEXT))
        text = packed
        if record.packed is not None:
            try:
                text = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, limits.LONGEST_TEXT)
            except zlib.error as error:
                raise Damaged("torn", f"{record.name!r} cannot be unpacked: {error}") from None
        if len(text) < record.size or RUN_ON_LOAD in text:
            layout.problems.add(
                "global",
                f"{record.name} has a {RUN_ON_LOAD.decode()} in TorchScript, which torch.load "
                "would run, or is too large to be read; nothing was run",
            )


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
    reader = _pickle_reader(source, zip_directory.records(source))
    with hostile_refused(reader.seen):
        return reader.value()


TORCH_ZIP = FileFormat(
    name="torch zip",
    matches=lambda source, _: source.at(0, len(SIGNATURE)) == SIGNATURE,
    read=read_zip,
    read_content=_content,
    suffixes=TORCH_SUFFIXES,
    shared_suffixes=TORCH_SHARED_SUFFIXES,
    starts=(SIGNATURE,),
)
