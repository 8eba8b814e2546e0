"""Arguments of pickle opcodes: the values of pickletools, without its trust in declared lengths."""

from __future__ import annotations

import io
import pickletools
from pathlib import Path
from typing import Any

import pytest

from stepguard.verification import limits
from stepguard.verification.bounded_file import open_file
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_arguments import READERS
from stepguard.verification.pickle_values import PickledBytes

BYTES = {
    "uint1": b"\xff",
    "uint2": b"\xff\x00",
    "int4": b"\xfe\xff\xff\xff",
    "uint4": b"\xfe\xff\xff\xff",
    "uint8": b"\x01" * 8,
    "decimalnl_short": b"-1234\n",
    "decimalnl_long": b"1234L\n",
    "floatnl": b"-1.25\n",
    "float8": b"\xbf\xf4\x00\x00\x00\x00\x00\x00",
    "long1": b"\x02\x00\xff",
    "long4": b"\x02\x00\x00\x00\xff\x00",
    "stringnl": b"'abc'\n",
    "stringnl_noescape": b"abc\n",
    "unicodestringnl": b"a\\u00e9\n",
    "unicodestring1": b"\x02\xc3\xa9",
    "unicodestring4": b"\x02\x00\x00\x00\xc3\xa9",
    "unicodestring8": b"\x02" + b"\x00" * 7 + b"\xc3\xa9",
    "string1": b"\x03abc",
    "string4": b"\x03\x00\x00\x00abc",
}


def argument(folder: Path, kind: str, content: bytes) -> Any:
    path = folder / "argument"
    path.write_bytes(content)
    with open_file(path) as source:
        return READERS[kind](source)


@pytest.mark.parametrize("kind", BYTES)
def test_value_is_that_of_pickletools(tmp_path: Path, kind: str) -> None:
    reader = getattr(pickletools, kind).reader
    assert argument(tmp_path, kind, BYTES[kind]) == reader(io.BytesIO(BYTES[kind]))


def test_two_names_come_as_a_pair(tmp_path: Path) -> None:
    assert argument(tmp_path, "stringnl_noescape_pair", b"os\nsystem\n") == ("os", "system")


def test_long_byte_string_stays_in_the_file(tmp_path: Path) -> None:
    size = limits.SMALL_BYTES + 1
    found = argument(tmp_path, "bytes4", size.to_bytes(4, "little") + b"x" * size)
    assert isinstance(found, PickledBytes)
    assert (found.start, found.size, found.data) == (4, size, None)


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("unicodestring8", (1 << 40).to_bytes(8, "little") + b"x", "torn"),
        ("bytes8", (1 << 40).to_bytes(8, "little") + b"x", "torn"),
        ("string4", b"\xff\xff\xff\xff", "malformed"),
        ("long4", b"\xff\xff\xff\x7f", "limit"),
        ("decimalnl_long", b"9" * 3000 + b"\n", "limit"),
        ("stringnl", b"abc\n", "malformed"),
    ],
)
def test_declared_length_is_checked_before_it_is_read(
    tmp_path: Path, kind: str, content: bytes, problem: str
) -> None:
    with pytest.raises(Damaged) as caught:
        argument(tmp_path, kind, content)
    assert caught.value.kind == problem


def test_text_longer_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LONGEST_TEXT", 3)
    with pytest.raises(Damaged) as caught:
        argument(tmp_path, "unicodestring1", b"\x04abcd")
    assert caught.value.kind == "limit"
