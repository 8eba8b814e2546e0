"""Zips of torch.save: every byte that a CRC covers is compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.parts import fuzz
from benchmarks.parts.fuzz import named, text
from hypothesis import given, settings
from hypothesis import strategies as st

import stepguard


@pytest.mark.slow
@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_in_the_data_of_a_zip_is_found(
    tmp_path_factory: pytest.TempPathFactory, whole: dict[str, bytes], place: float, bit: int
) -> None:
    """Everything a CRC covers; the padding between records is nobody's."""
    import io
    import zipfile

    content = bytearray(whole["zip.pt"])
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        covered = [
            offset
            for entry in archive.infolist()
            for start in [
                entry.header_offset
                + 30
                + int.from_bytes(
                    content[entry.header_offset + 26 : entry.header_offset + 28], "little"
                )
                + int.from_bytes(
                    content[entry.header_offset + 28 : entry.header_offset + 30], "little"
                )
            ]
            for offset in range(start, start + entry.file_size)
        ]
    at = covered[int(place * len(covered))]
    content[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / "zip.pt"
    path.write_bytes(content)
    assert stepguard.verify(path).corrupt, f"bit {bit} of byte {at}"


def test_checksum_names_the_record_and_both_sums(
    tmp_path: Path, whole: dict[str, bytes], everything: dict[str, Any]
) -> None:
    content = bytearray(whole["zip.pt"])
    weight = everything["state_dict"]["outer.weight"].numpy().tobytes()
    content[content.find(weight) + 10] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    (error,) = stepguard.verify(tmp_path / "m.pt").errors
    assert (
        error.kind == "checksum"
        and "/data/" in error.detail
        and "bytes have changed" in error.detail
    )


def test_file_without_checksums_says_that_flips_cannot_be_found(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.randn(200, 200)}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = stepguard.verify(tmp_path / "m.pt")
    assert found.ok and [warning.kind for warning in found.warnings] == ["checksum"]


@pytest.mark.parametrize(
    ("elements", "view", "kind"),
    [
        (b"K\x01", b"K\x01K\x01\x85K\x01\x85", "malformed"),
        (b"K\x01", b"J\xff\xff\xff\xffK\x01\x85K\x01\x85", "malformed"),
        (b"K\x01", b"K\x00K\x01\x85J\xff\xff\xff\xff\x85", "malformed"),
        (b"K\x01", b"K\x00K\x01K\x01\x86K\x01\x85", "malformed"),
        (b"K\x01", b"K\x00K\x02\x85K\x01\x85", "malformed"),
        (b"K\x02", b"K\x00K\x01\x85K\x01\x85", "torn"),
        (b"K\x01", b"K\x00K\x05\x85K\x00\x85", ""),
        (b"K\x01", b"K\x00K\x00\x85K\x01\x85", ""),
    ],
)
def test_tensor_that_does_not_fit_into_its_storage_is_a_problem(
    tmp_path: Path, elements: bytes, view: bytes, kind: str
) -> None:
    """The archive holds one storage of one float; the view is offset, shape and strides."""
    storage = text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + elements
    hooks = b"\x89" + named("collections", "OrderedDict") + b")R"
    call = named("torch._utils", "_rebuild_tensor_v2") + b"((" + storage + b"tQ" + view + hooks
    (tmp_path / "m.pt").write_bytes(fuzz.zip_file(fuzz.archive(b"\x80\x04" + call + b"tR.")))
    found = stepguard.verify(tmp_path / "m.pt")
    assert [problem.kind for problem in found.errors] == [kind] * bool(kind), found.problems
    assert found.tensors == (not kind)
