"""Read the arguments of pickle opcodes, one function a kind, under the names of `pickletools`.

`pickletools` itself reads byte strings whole, with the length that the file declares. Here every
length is compared with what is left of the file first, and long byte strings are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from stepguard.verification import limits
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_values import PickledBytes

Reader = Callable[[FileSlice], Any]
Length = Callable[[FileSlice], int]


def _number(layout: str) -> Reader:
    reader = struct.Struct(layout)

    def read(source: FileSlice) -> Any:
        return reader.unpack(source.read(reader.size))[0]

    return read


_uint1 = FileSlice.byte
_uint2 = _number("<H")
_int4 = _number("<i")
_uint4 = _number("<I")
_uint8 = _number("<Q")


def _line(source: FileSlice) -> str:
    return source.line(limits.LONGEST_LINE).decode("utf-8")


def _two_lines(source: FileSlice) -> tuple[str, str]:
    first = _line(source)
    return first, _line(source)


def _escaped_line(source: FileSlice) -> str:
    # protocol 0 writes text as ASCII with \\u escapes
    return source.line(limits.LONGEST_LINE).decode("raw-unicode-escape")


def _quoted_line(source: FileSlice) -> str:
    text = _line(source)
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        raise Damaged("malformed", f"a text without quotes at byte {source.tell():,}")
    return text[1:-1]


def _integer_line(source: FileSlice) -> int:
    text = _line(source)
    # protocol 0 has no opcode for True and False: it writes INT with 01 and 00
    if text in ("00", "01"):
        return text == "01"
    if len(text) > 2 * limits.LONGEST_INTEGER:
        raise Damaged("limit", f"an integer of {len(text):,} digits")
    return int(text.removesuffix("L"))


def _float_line(source: FileSlice) -> float:
    return float(_line(source))


def _long(length: Length) -> Reader:
    def read(source: FileSlice) -> int:
        count = length(source)
        if not 0 <= count <= limits.LONGEST_INTEGER:
            raise Damaged("limit", f"an integer of {count:,} bytes at byte {source.tell():,}")
        return int.from_bytes(source.read(count), "little", signed=True)

    return read


def _text(length: Length) -> Reader:
    def read(source: FileSlice) -> str:
        count = length(source)
        # a text that the file cannot hold is torn, not too long
        if limits.LONGEST_TEXT < count <= source.left:
            raise Damaged("limit", f"a text of {count:,} bytes at byte {source.tell():,}")
        # Python pickles lone surrogates, which strict UTF-8 refuses
        return source.read(count).decode("utf-8", "surrogatepass")

    return read


def _bytes(length: Length) -> Callable[[FileSlice], PickledBytes]:
    """Long byte strings stay in the file: they may be an array of gigabytes."""

    def read(source: FileSlice) -> PickledBytes:
        count = length(source)
        if count < 0:
            raise Damaged("malformed", f"a byte string of {count} bytes")
        start = source.start + source.tell()
        if count <= limits.SMALL_BYTES:
            return PickledBytes(start, count, source.read(count))
        source.skip(count)
        return PickledBytes(start, count)

    return read


def _text_or_bytes(length: Length) -> Reader:
    """Python 2 had one type for texts and bytes."""
    read_bytes = _bytes(length)

    def read(source: FileSlice) -> str | PickledBytes:
        raw = read_bytes(source)
        if raw.data is not None and raw.data.isascii():
            return raw.data.decode()
        return raw

    return read


READERS: dict[str, Reader] = {
    "uint1": _uint1,
    "uint2": _uint2,
    "int4": _int4,
    "uint4": _uint4,
    "uint8": _uint8,
    "decimalnl_short": _integer_line,
    "decimalnl_long": _integer_line,
    "floatnl": _float_line,
    "float8": _number(">d"),
    "long1": _long(_uint1),
    "long4": _long(_int4),
    "stringnl": _quoted_line,
    "stringnl_noescape": _line,
    "stringnl_noescape_pair": _two_lines,
    "string1": _text_or_bytes(_uint1),
    "string4": _text_or_bytes(_int4),
    "unicodestringnl": _escaped_line,
    "unicodestring1": _text(_uint1),
    "unicodestring4": _text(_uint4),
    "unicodestring8": _text(_uint8),
    "bytes1": _bytes(_uint1),
    "bytes4": _bytes(_uint4),
    "bytes8": _bytes(_uint8),
    "bytearray8": _bytes(_uint8),
}
"""`ArgumentDescriptor.name` of pickletools -> the function that reads it."""
