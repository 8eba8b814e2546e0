"""The directory of a zip, with every entry checked before a byte of it is used: place, name, size,
compression.
"""

from __future__ import annotations

import struct
import zipfile
from collections import Counter
from dataclasses import dataclass

from stepguard.verification import limits
from stepguard.verification.bounded_file import Clamped, Window
from stepguard.verification.damage import Damaged, Notes, listed

LOCAL = struct.Struct("<4s5H3I2H")
SIGNATURE = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Record:
    """One stored entry."""

    name: str
    start: int
    """In the window."""
    size: int
    crc: int
    packed: int | None = None
    """Bytes in the file of an entry that is compressed. Such an entry is never unpacked."""


def records(window: Window, notes: Notes) -> dict[str, Record]:
    """Name without the archive's folder -> entry. Raises Damaged where the zip as a whole cannot be
    trusted.
    """
    entries = _entries(window)
    twice = [
        name for name, times in Counter(entry.filename for entry in entries).items() if times > 1
    ]
    if twice:
        raise Damaged("duplicate", f"the zip holds {listed(sorted(twice))} more than once")
    found = {}
    for entry in entries:
        if entry.filename.endswith("/"):
            continue
        record = _record(window, entry)
        found[record.name.partition("/")[2] or record.name] = record
    _no_overlap(list(found.values()))
    return found


def _entries(window: Window) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(Clamped(window, limits.LARGEST_DIRECTORY)) as archive:
            return archive.infolist()
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
        struct.error,
        NotImplementedError,
        UnicodeError,
    ) as error:
        raise Damaged(
            "torn",
            f"the zip directory cannot be read ({error}): the file was not written to its end",
        ) from None
    except (IndexError, KeyError, OverflowError) as error:
        raise Damaged(
            "malformed", f"the zip directory is damaged: {type(error).__name__}"
        ) from None


def _record(window: Window, entry: zipfile.ZipInfo) -> Record:
    name = entry.filename
    parts = name.replace("\\", "/").split("/")
    if name.startswith("/") or ".." in parts or (len(parts[0]) > 1 and parts[0][1] == ":"):
        raise Damaged(
            "hostile", f"the zip holds {name!r}, which would be unpacked outside its folder"
        )
    if entry.flag_bits & 0x1:
        raise Damaged("malformed", f"{name!r} is encrypted")
    header = window.at(entry.header_offset, LOCAL.size)
    if len(header) < LOCAL.size or header[:4] != SIGNATURE:
        raise Damaged("torn", f"the header of {name!r} is not where the zip directory says")
    *_, name_size, extra_size = LOCAL.unpack(header)
    start = entry.header_offset + LOCAL.size + name_size + extra_size
    own = window.at(entry.header_offset + LOCAL.size, name_size)
    if own != entry.orig_filename.encode(
        "utf-8", "surrogateescape"
    ) and own != entry.orig_filename.encode("cp437", "replace"):
        raise Damaged(
            "malformed", f"{name!r} has another name in its header than in the zip directory"
        )
    if start + entry.compress_size > window.size:
        raise Damaged(
            "torn",
            f"{name!r} should end at byte {start + entry.compress_size:,} of {window.size:,}",
        )
    is_stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
    return Record(
        name, start, entry.file_size, entry.CRC, None if is_stored else entry.compress_size
    )


def stored(record: Record) -> Record:
    """The entry, if its bytes are its content; Damaged if it would have to be unpacked."""
    if record.packed is not None:
        raise Damaged(
            "limit",
            f"{record.name!r} is compressed ({record.packed:,} to {record.size:,} bytes); "
            f"torch.save stores "
            "records as they are, so it is not unpacked",
        )
    return record


def _no_overlap(found: list[Record]) -> None:
    """Entries that share bytes are how a small zip pretends to be a large one."""
    end, before = 0, ""
    for record in sorted(found, key=lambda record: record.start):
        if record.start < end:
            raise Damaged(
                "hostile", f"{record.name!r} and {before!r} share the same bytes of the file"
            )
        size = record.size if record.packed is None else record.packed
        end, before = record.start + size, record.name
