"""The CRC of a whole from those of its parts."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from stepguard.verification import crc


@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_checksum_of_two_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc.combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )
