"""Read a file exactly and never beyond its end; devices, FIFOs and sockets are refused."""

from __future__ import annotations

import io
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard.records.checks import Problem, ProblemKind, Role, Weight

# --- Combine CRC-32s of parts into that of the whole, so that threads can compute parts at once.


try:
    # the same function as zlib's, three times as fast
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["combine", "crc32"]

POLYNOMIAL = 0xEDB88320
"""Of CRC-32, bits reversed."""
Matrix = tuple[int, ...]
"""32 columns: what each bit of a CRC turns into."""


def combine(first: int, second: int, size: int) -> int:
    """Return the CRC of `a + b` from the CRCs of `a` and of `b`, which is `size` bytes long."""
    if not size:
        return first
    return _apply(_zeros(size), first) ^ second


def _apply(matrix: Matrix, vector: int) -> int:
    total = 0
    column = 0
    while vector:
        if vector & 1:
            total ^= matrix[column]
        vector >>= 1
        column += 1
    return total


def _times(left: Matrix, right: Matrix) -> Matrix:
    return tuple(_apply(left, column) for column in right)


@lru_cache(maxsize=256)
def _zeros(size: int) -> Matrix:
    """Return the effect of `size` zero bytes on a CRC, by repeated squaring."""
    result: Matrix | None = None
    power = _one_zero_byte()
    while size:
        if size & 1:
            result = power if result is None else _times(power, result)
        size >>= 1
        if size:
            power = _squared(power)
    assert result is not None
    return result


@lru_cache(maxsize=64)
def _squared(matrix: Matrix) -> Matrix:
    return _times(matrix, matrix)


@lru_cache(maxsize=1)
def _one_zero_byte() -> Matrix:
    bit: Matrix = (POLYNOMIAL, *(1 << n for n in range(31)))
    # one bit, squared three times: eight bits
    for _ in range(3):
        bit = _times(bit, bit)
    return bit


# --- How much a file may ask for before reading stops; real checkpoints stay far below.


MOST_OPERATIONS = 10_000_000
"""Opcodes of one pickle stream; 100 000 tensors need about 4 million."""
MOST_STACK = 1_000_000
MOST_MEMO = 4_000_000
MOST_NAMES = 10_000
"""Importable names that one file refers to."""
MOST_WORK = 20_000_000
"""Items that are compared or copied because an opcode refers to a value of any size."""
MOST_DEPTH = 100
"""Containers inside containers."""
MOST_NODES = 5_000_000
"""Values visited when a pickle's contents are walked."""
MOST_TENSORS = 1_000_000
LONGEST_TEXT = 16 << 20
LONGEST_LINE = 1 << 16
"""Of a text opcode: GLOBAL, INST, INT, FLOAT, ..."""
LONGEST_INTEGER = 1 << 10
"""Bytes of one integer."""
SMALL_BYTES = 1 << 16
"""Byte strings up to this length are kept in memory; of longer ones only the offset is kept."""
LONGEST_ENTRY = 250
"""Bytes of the name of an entry in a zip."""
LARGEST_DIRECTORY = 24 << 20
"""Bytes of a zip's central directory: about 300 000 records."""
LARGEST_HEADER = 32 << 20
"""Bytes of a safetensors header: about 300 000 tensors."""
LARGEST_JSON = 32 << 20
MOST_DIMENSIONS = 64
LARGEST_DIMENSION = 1 << 63
"""Python integers have no end, and one of more than 4300 digits cannot even be printed."""
MOST_PER_KIND = 20
"""Problems of one kind that are listed for one file; the others are counted in one line."""


def is_shape(value: object) -> bool:
    """Could these be the sizes or strides of a tensor? Only then may they be multiplied."""
    if not isinstance(value, tuple | list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(n) is int and abs(n) <= LARGEST_DIMENSION for n in value)


# --- `Damaged`, the one exception of the readers, and the list of problems found in one file.


LONGEST_NAME = 200
LONGEST_DETAIL = 600


def clean(text: str, longest: int) -> str:
    """Replace unprintable characters and shorten: text from a file must not control a terminal."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    if len(shown) > longest:
        return shown[: longest - 3] + "..."
    return shown


class Damaged(Exception):  # noqa: N818 (an outcome of reading, not a fault of ours)
    """Reading cannot continue; carries the kind of problem and a sentence."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class NotPickled(Damaged):
    """No unpickler gets past this byte: the file is not a pickle, or the pickle ends here."""


class ProblemList:
    """The problems of one file. Only the first of each kind are kept, the others are counted."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._kept: list[Problem] = []
        self._seen: Counter[tuple[ProblemKind, Weight]] = Counter()

    def add(
        self,
        kind: ProblemKind,
        detail: str,
        *,
        tensor: str | None = None,
        severity: Weight = "error",
        role: Role | None = None,
    ) -> None:
        self._seen[kind, severity] += 1
        if self._seen[kind, severity] > MOST_PER_KIND:
            return
        problem = Problem(
            file=self.file,
            kind=kind,
            tensor=None if tensor is None else clean(tensor, LONGEST_NAME),
            detail=clean(detail, LONGEST_DETAIL),
            severity=severity,
            role=role,
        )
        self._kept.append(problem)

    def add_damage(self, damage: Damaged) -> None:
        self.add(damage.kind, damage.detail)

    def all(self) -> list[Problem]:
        """Return the kept problems, and one line for each kind of which some were left out."""
        listed = list(self._kept)
        for (kind, severity), seen in self._seen.items():
            more = seen - MOST_PER_KIND
            if more > 0:
                detail = f"and {more} more of this kind in this file"
                listed.append(Problem(file=self.file, kind=kind, severity=severity, detail=detail))
        return listed


# --- Read a file exactly and never beyond its end; devices, FIFOs and sockets are refused.


BUFFER = 1 << 18
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class FileSlice:
    """`size` bytes of an open file from `start` on, read exactly or not at all."""

    def __init__(self, descriptor: int, start: int, size: int, path: Path) -> None:
        self.descriptor = descriptor
        self.start = start
        self.size = size
        self.path = path

    def part(self, start: int, size: int) -> FileSlice:
        """Return a slice of this slice; it must lie inside."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Damaged(
                "torn",
                f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}",
            )
        return FileSlice(self.descriptor, self.start + start, size, self.path)

    def at(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes at `position`."""
        size = max(0, min(size, self.size - position))
        return _pread(self.descriptor, size, self.start + position)

    def exactly(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`, or raise Damaged before memory is taken for them."""
        if size > self.size - position:
            raise Damaged(
                "torn",
                f"ends at byte {self.size:,} where {size:,} more are declared at {position:,}",
            )
        data = self.at(position, size)
        if len(data) < size:
            raise Damaged(
                "torn",
                f"ends at byte {position + len(data):,}: it became shorter while it was read",
            )
        return data

    def reader(self) -> io.BufferedReader:
        """Return a file object of the slice, for readers that go from opcode to opcode."""
        return io.BufferedReader(_SliceStream(self), BUFFER)


class _SliceStream(io.RawIOBase):
    """A slice as a raw stream; it reads by offset and leaves the position of the file alone."""

    def __init__(self, source: FileSlice) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._source.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def open_file(path: Path) -> Iterator[FileSlice]:
    """Open a regular file as a slice of its whole length; anything else is refused unopened."""
    try:
        refuse_special(path.stat().st_mode)
        # without O_NONBLOCK, opening a FIFO that has no writer would wait forever
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise Damaged("unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        # the path may have been replaced between stat and open
        refuse_special(facts.st_mode)
        yield FileSlice(descriptor, 0, facts.st_size, path)
    finally:
        os.close(descriptor)


def refuse_special(mode: int) -> None:
    """Raise Damaged for the mode of a FIFO, a socket, a device or a folder."""
    if not stat.S_ISREG(mode):
        raise Damaged("unreadable", f"is {special_name(mode)}, not a file")


def special_name(mode: int) -> str:
    """Name the kind of a special file for a message: `a device`."""
    return KINDS.get(stat.S_IFMT(mode), "something else")


def _pread(descriptor: int, size: int, position: int) -> bytes:
    """Read `size` bytes at `position`; fewer only at the end of the file."""
    data = b""
    try:
        # one pread returns at most 2 GB on Linux, and less after a signal
        while len(data) < size:
            more = os.pread(descriptor, size - len(data), position + len(data))
            if not more:
                break
            data = data + more if data else more
    except OSError as error:
        raise Damaged(
            "unreadable", f"cannot be read at byte {position:,}: {error.strerror}"
        ) from error
    return data


# --- The directory of a zip, read as torch reads it, and only where no two readers could differ.


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


def zip_records(source: FileSlice) -> dict[str, ZipRecord]:
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
    if size > LARGEST_DIRECTORY:
        raise Damaged(
            "limit",
            f"a zip directory of {size:,} bytes is more than the {LARGEST_DIRECTORY:,} that "
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
    is_long = len(name.encode()) > LONGEST_ENTRY
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


# --- Element types by their torch names: sizes, and the names other formats have for them.


SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
}  # fmt: skip
ALIASES = {
    "float": "float32", "double": "float64", "half": "float16",
    "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip
STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64",
    "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
SAFETENSORS_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of types that are packed below a byte: their size is checked, their values are not."""
NUMPY = {
    "f8": "float64", "f4": "float32", "f2": "float16", "c16": "complex128", "c8": "complex64",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool",
}  # fmt: skip
LARGEST = {"float64": 1.797e308, "float32": 3.402e38, "bfloat16": 3.389e38, "float16": 65504.0}
"""Types whose values are judged by magnitude; 8-bit floats have a scale stored beside them."""


def is_real(dtype: str) -> bool:
    """Can an element be NaN or infinite?"""
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float4_e2m1fn_x2"


# --- Statistics of the values in a piece of memory: range, and counts of NaN and infinities.


WIDENED = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Types for which torch has no aminmax; they are converted to float32."""
PARTS = {"complex128": torch.float64, "complex64": torch.float32, "complex32": torch.float16}
"""Complex numbers are read as pairs of these."""


@dataclass(frozen=True, slots=True)
class PieceStatistics:
    """Statistics of one piece; `low` and `high` are those of the finite values."""

    count: int
    low: float
    high: float
    nan: int = 0
    positive: int = 0
    negative: int = 0
    first: int | None = None
    """Element number in the piece of the first value that is not finite."""


def as_tensor(memory: bytearray, offset: int, size: int, dtype: str) -> Tensor:
    """View bytes as numbers, without a copy; complex ones as pairs."""
    real = _real_type(dtype)
    return torch.frombuffer(memory, dtype=real, count=size // real.itemsize, offset=offset)


def statistics_of(values: Tensor, dtype: str) -> PieceStatistics:
    """Measure every value: in one pass, or in several where something is not finite."""
    if dtype in WIDENED:
        values = values.to(torch.float32)
    # aminmax returns NaN if any value is NaN, so finite bounds prove that all values are finite
    low, high = (float(bound) for bound in torch.aminmax(values))
    parts = 2 if dtype in PARTS else 1
    count = values.numel() // parts
    if math.isfinite(low) and math.isfinite(high):
        return PieceStatistics(count, low, high)
    return _with_bad_values(values, count, parts)


class Extremes:
    """Least and greatest values of many pieces of one type, fetched together at the end.

    Fetching a number takes the interpreter lock, for which the other threads wait.
    """

    def __init__(self, dtype: str, pieces: int) -> None:
        self._widen = dtype in WIDENED
        real = torch.float32 if self._widen else _real_type(dtype)
        self._low, self._high = torch.empty(2, pieces, dtype=real)
        self._outputs = list(zip(self._low.unbind(), self._high.unbind(), strict=True))

    def add(self, number: int, values: Tensor) -> None:
        if self._widen:
            values = values.to(torch.float32)
        # with out= the result stays in memory and nothing waits for it
        torch.aminmax(values, out=self._outputs[number])

    def bounds(self) -> list[tuple[float, float]]:
        low = map(float, self._low.tolist())
        high = map(float, self._high.tolist())
        return list(zip(low, high, strict=True))


def squares(values: Tensor) -> float:
    """Return the sum of the squares of the finite values."""
    finite = torch.nan_to_num(values.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return float(torch.dot(finite, finite))


def _real_type(dtype: str) -> torch.dtype:
    real: torch.dtype = PARTS.get(dtype) or getattr(torch, dtype)
    return real


def _with_bad_values(values: Tensor, count: int, parts: int) -> PieceStatistics:
    bad = ~torch.isfinite(values)
    finite = values[~bad]
    low = math.inf
    high = -math.inf
    if finite.numel():
        low, high = (float(bound) for bound in torch.aminmax(finite))
    return PieceStatistics(
        count,
        low,
        high,
        nan=int(torch.isnan(values).sum()),
        positive=int(torch.isposinf(values).sum()),
        negative=int(torch.isneginf(values).sum()),
        # argmax is not defined for bool
        first=int(bad.to(torch.uint8).argmax()) // parts,
    )
