"""The directory of a zip, every entry checked before a byte of it is used."""

from __future__ import annotations

import struct
import zipfile
from collections import Counter
from dataclasses import dataclass

from stepguard.report.phrases import first_few
from stepguard.verification import limits
from stepguard.verification.bounded_file import FileSlice, ZipSource
from stepguard.verification.damage import Damaged

LOCAL = struct.Struct("<4s5H3I2H")
"""The header in front of every entry; its last two numbers are the lengths of name and extra."""
SIGNATURE = b"PK\x03\x04"
ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One entry of a zip."""

    name: str
    start: int
    """In the slice."""
    size: int
    crc: int
    packed: int | None = None
    """Bytes in the file of an entry that is compressed. Such an entry is never unpacked."""


def records(source: FileSlice) -> dict[str, ZipRecord]:
    """Return the entries by name without the archive's folder, or raise Damaged."""
    entries = _entries(source)
    times = Counter(entry.filename for entry in entries)
    doubled = sorted(name for name in times if times[name] > 1)
    if doubled:
        raise Damaged("duplicate", f"the zip holds {first_few(doubled, 5)} more than once")
    found = {}
    for entry in entries:
        if not entry.filename.endswith("/"):
            record = _record(source, entry)
            found[record.name.partition("/")[2] or record.name] = record
    _refuse_overlap(list(found.values()))
    return found


def stored(record: ZipRecord) -> ZipRecord:
    """Return the entry if its bytes are its content; Damaged if it would have to be unpacked."""
    if record.packed is not None:
        raise Damaged(
            "limit",
            f"{record.name!r} is compressed ({record.packed:,} to {record.size:,} bytes); "
            f"torch.save stores records as they are, so it is not unpacked",
        )
    return record


def _entries(source: FileSlice) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(ZipSource(source, limits.LARGEST_DIRECTORY)) as archive:
            return archive.infolist()
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
        struct.error,
        NotImplementedError,
        UnicodeError,
    ) as error:
        # the directory is written last, so a file that was cut off has none
        raise Damaged(
            "torn",
            f"the zip directory cannot be read ({error}): the file was not written to its end",
        ) from None
    except (IndexError, KeyError, OverflowError) as error:
        raise Damaged(
            "malformed", f"the zip directory is damaged: {type(error).__name__}"
        ) from None


def _record(source: FileSlice, entry: zipfile.ZipInfo) -> ZipRecord:
    """Check an entry against the header in front of its bytes, which other readers believe."""
    name = entry.filename
    _refuse_path(name)
    if entry.flag_bits & ENCRYPTED:
        raise Damaged("malformed", f"{name!r} is encrypted")
    header = source.at(entry.header_offset, LOCAL.size)
    if len(header) < LOCAL.size or header[:4] != SIGNATURE:
        raise Damaged("torn", f"the header of {name!r} is not where the zip directory says")
    *_, name_size, extra_size = LOCAL.unpack(header)
    name_start = entry.header_offset + LOCAL.size
    if not _same_name(source.at(name_start, name_size), entry.orig_filename):
        raise Damaged(
            "malformed", f"{name!r} has another name in its header than in the zip directory"
        )
    # the lengths of the directory must not be used: torch pads the extra field of the header only,
    # so that every storage begins at a multiple of 64 bytes
    start = name_start + name_size + extra_size
    end = start + entry.compress_size
    if end > source.size:
        raise Damaged("torn", f"{name!r} should end at byte {end:,} of {source.size:,}")
    packed = None
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        packed = entry.compress_size
    return ZipRecord(name, start, entry.file_size, entry.CRC, packed)


def _refuse_path(name: str) -> None:
    parts = name.replace("\\", "/").split("/")
    has_drive = len(parts[0]) > 1 and parts[0][1] == ":"
    if name.startswith("/") or ".." in parts or has_drive:
        raise Damaged(
            "hostile", f"the zip holds {name!r}, which would be unpacked outside its folder"
        )


def _same_name(stored_name: bytes, listed_name: str) -> bool:
    # zipfile decodes a name as UTF-8 or as cp437, depending on a flag of the directory
    if stored_name == listed_name.encode("utf-8", "surrogateescape"):
        return True
    return stored_name == listed_name.encode("cp437", "replace")


def _refuse_overlap(found: list[ZipRecord]) -> None:
    """Entries that share bytes are how a small zip pretends to be a large one."""
    end = 0
    before = ""
    for record in sorted(found, key=lambda record: record.start):
        if record.start < end:
            raise Damaged(
                "hostile", f"{record.name!r} and {before!r} share the same bytes of the file"
            )
        size = record.size if record.packed is None else record.packed
        end = record.start + size
        before = record.name
