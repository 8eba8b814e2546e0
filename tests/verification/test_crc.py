"""The CRC of a whole from those of its parts."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from stepguard.verification import bounded_file


@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_checksum_of_two_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert bounded_file.combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )
