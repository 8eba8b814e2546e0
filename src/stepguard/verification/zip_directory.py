"""The directory of a zip, read as torch reads it, and only where no two readers could differ.

`zipfile` and the reader of torch (miniz) look for the directory in different ways: one shifts it by
what stands before the archive, the other believes offsets; one takes the zip64 record that stands
before its locator, the other the one that the locator names. So there is one place for each record:
the end record is the last of the file, what belongs to zip64 stands right before it, the directory
right before that, and the entries fill the file from its first byte to the directory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from stepguard.verification import limits
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged

LOCAL = struct.Struct("<4s5H3I2H")
"""The header in front of every entry; its last two numbers are the lengths of name and extra."""
ENTRY = struct.Struct("<4s6H3I5H2I")
"""An entry of the directory."""
END = struct.Struct("<4s4H2IH")
"""The end record: disks, counts, size and offset of the directory, length of the comment."""
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
EXTRA = struct.Struct("<2H")
ZIP64_FIELD = 0x0001
LARGE = 0xFFFFFFFF
"""A 32-bit number whose value is in the zip64 field."""
ENCRYPTED = 0x1
DESCRIPTORS = (0, 12, 16, 20, 24)
"""Bytes that may follow the content of an entry: its sizes once more, as a stream writes them."""
SPECIAL = frozenset({"data.pkl", "constants.pkl", "byteorder", "version"})


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One entry of a zip."""

    name: str
    header: int
    """Offset of its header in the slice."""
    start: int
    """Offset of its content in the slice."""
    size: int
    crc: int
    packed: int | None = None
    """Bytes in the file of an entry that is compressed. Such an entry is never unpacked."""

    @property
    def end(self) -> int:
        return self.start + (self.size if self.packed is None else self.packed)


def records(source: FileSlice) -> dict[str, ZipRecord]:
    """Return the entries by name without the archive's folder, or raise Damaged."""
    count, start, size = _directory(source)
    data = source.exactly(start, size)
    found: dict[str, ZipRecord] = {}
    folded: set[str] = set()
    folder = None
    at = 0
    for _ in range(count):
        record, at = _record(source, data, at)
        # torch looks for names in the folder of the first entry, whatever the case of letters
        first, slash, name = record.name.partition("/")
        folder = first if folder is None else folder
        if not slash or first != folder:
            raise Damaged(
                "malformed", f"{record.name!r} is not in the folder {folder!r} of the zip"
            )
        if name.lower() in folded:
            raise Damaged("duplicate", f"the zip holds {record.name!r} more than once")
        if name.lower() in SPECIAL and name not in SPECIAL:
            raise Damaged(
                "hostile", f"the zip holds {record.name!r}, which torch takes for another"
            )
        folded.add(name.lower())
        found[name] = record
    if at != size:
        raise Damaged("malformed", f"the zip directory has {size - at:,} bytes too many")
    _refuse_gaps(list(found.values()), start)
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


def _directory(source: FileSlice) -> tuple[int, int, int]:
    """Return number of entries, offset and size of the directory, from the end of the file."""
    last = source.size - END.size
    torn = Damaged("torn", "the zip has no directory at its end: it was not written to its end")
    signature, disk, first_disk, here, count, size, start, comment = END.unpack(
        source.at(max(0, last), END.size).ljust(END.size)
    )
    if signature != b"PK\x05\x06" or comment:
        raise torn
    end = last
    locator = source.at(max(0, last - LOCATOR.size), LOCATOR.size)
    if locator[:4] == b"PK\x06\x07":
        end = last - LOCATOR.size - END64.size
        _, _, named, _ = LOCATOR.unpack(locator)
        if end < 0 or named != end:
            raise Damaged(
                "hostile", f"the zip64 record is not at byte {named:,}, where it is named"
            )
        signature, length, _, _, disk, first_disk, here, count, size, start = END64.unpack(
            source.exactly(end, END64.size)
        )
        if signature != b"PK\x06\x06" or length != END64.size - 12:
            raise Damaged("malformed", "the zip64 record is not what any writer writes")
    if disk or first_disk or here != count:
        raise Damaged("malformed", "the zip is one of several parts")
    if start + size != end:
        raise Damaged(
            "hostile" if start + size < end else "torn",
            f"the zip directory should end at byte {start + size:,}, its end record is at {end:,}: "
            "bytes were put in front of it or taken away",
        )
    if size > limits.LARGEST_DIRECTORY:
        raise Damaged(
            "limit",
            f"a zip directory of {size:,} bytes is more than the {limits.LARGEST_DIRECTORY:,} that "
            "are read",
        )
    return count, start, size


def _record(source: FileSlice, data: bytes, at: int) -> tuple[ZipRecord, int]:
    """Read an entry and compare it with the header in front of its bytes."""
    if len(data) - at < ENTRY.size or data[at : at + 4] != b"PK\x01\x02":
        raise Damaged("malformed", "the zip directory is damaged")
    fields = ENTRY.unpack_from(data, at)
    flags, method = fields[3:5]
    crc, packed, size, name_size, extra_size, comment_size, disk = fields[7:14]
    name_start = at + ENTRY.size
    extra_start = name_start + name_size
    end = extra_start + extra_size + comment_size
    if end > len(data):
        raise Damaged("malformed", "the zip directory is damaged")
    raw = data[name_start:extra_start]
    name = raw.decode("utf-8", "replace")
    _refuse_path(name)
    size, packed, header = _wide(
        name, data[extra_start : extra_start + extra_size], size, packed, fields[16]
    )
    if flags & ENCRYPTED or disk:
        raise Damaged("malformed", f"{name!r} is encrypted or in another part of the zip")
    local = source.at(header, LOCAL.size)
    if len(local) < LOCAL.size or local[:4] != b"PK\x03\x04":
        raise Damaged("torn", f"the header of {name!r} is not where the zip directory says")
    *_, local_name, local_extra = LOCAL.unpack(local)
    if source.at(header + LOCAL.size, local_name) != raw:
        raise Damaged(
            "malformed", f"{name!r} has another name in its header than in the zip directory"
        )
    # the lengths of the directory must not be used: torch pads the extra field of the header only,
    # so that every storage begins at a multiple of 64 bytes
    start = header + LOCAL.size + local_name + local_extra
    if start + packed > source.size:
        raise Damaged("torn", f"{name!r} should end at byte {start + packed:,} of {source.size:,}")
    is_stored = method == 0 and packed == size
    return ZipRecord(name, header, start, size, crc, None if is_stored else packed), end


def _wide(name: str, extra: bytes, *numbers: int) -> list[int]:
    """Return sizes and offset, those that do not fit into 32 bits from the zip64 field."""
    fields = []
    at = 0
    while at < len(extra):
        if len(extra) - at < EXTRA.size:
            raise Damaged("malformed", f"{name!r} has a damaged extra field")
        kind, length = EXTRA.unpack_from(extra, at)
        at += EXTRA.size + length
        if kind == ZIP64_FIELD:
            fields.append(extra[at - length : at])
    if at > len(extra) or len(fields) > 1:
        raise Damaged("malformed", f"{name!r} has a damaged extra field")
    wide = list(numbers)
    place = 0
    for number, value in enumerate(numbers):
        if value == LARGE:
            part = fields[0][place : place + 8] if fields else b""
            if len(part) < 8:
                raise Damaged("malformed", f"{name!r} has no size that can be read")
            wide[number] = int.from_bytes(part, "little")
            place += 8
    return wide


def _refuse_path(name: str) -> None:
    parts = name.replace("\\", "/").split("/")
    has_drive = len(parts[0]) > 1 and parts[0][1] == ":"
    if name.startswith("/") or ".." in parts or has_drive:
        raise Damaged(
            "hostile", f"the zip holds {name!r}, which would be unpacked outside its folder"
        )
    # torch cuts off names that are longer
    is_long = len(name.encode()) > limits.LONGEST_ENTRY
    if is_long or not name.isprintable() or "\N{REPLACEMENT CHARACTER}" in name:
        raise Damaged("malformed", f"the zip holds an entry with the name {name[:80]!r}")


def _refuse_gaps(found: list[ZipRecord], directory: int) -> None:
    """Entries fill the file: none shares bytes with another, and nothing lies between them."""
    end = 0
    before = "the beginning"
    found.sort(key=lambda record: record.header)
    for place, start, name in (
        *((record.end, record.header, record.name) for record in found),
        (directory, directory, "the zip directory"),
    ):
        if start < end:
            raise Damaged("hostile", f"{name!r} and {before!r} share the same bytes of the file")
        if start - end not in DESCRIPTORS or (start != end and not end):
            raise Damaged(
                "hostile", f"{start - end:,} bytes lie hidden between {before} and {name}"
            )
        end = place
        before = name
