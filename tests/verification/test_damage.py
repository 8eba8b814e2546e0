"""Files that were torn or altered: truncation anywhere, flipped bits where the format has a
checksum, lost shards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepguard
from verification import saved


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    return saved.trained()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, everything: dict[str, Any]) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    saved.save_zip(folder / "zip.pt", everything)
    saved.save_legacy(folder / "legacy.pt", everything)
    saved.save_safetensors(folder / "m.safetensors", everything["state_dict"])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "m.safetensors"])
def test_truncation_anywhere_is_an_error(
    tmp_path: Path, whole: dict[str, bytes], name: str
) -> None:
    content = whole[name]
    for length in range(0, len(content), max(1, len(content) // 97)):
        (tmp_path / name).write_bytes(content[:length])
        assert stepguard.verify(tmp_path / name).corrupt, f"cut at {length} of {len(content)}"


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


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path: Path, everything: dict[str, Any]) -> Path:
        return saved.save_sharded(tmp_path / "model", everything["state_dict"], shards=3)

    def test_healthy_folder_is_good(self, folder: Path) -> None:
        found = stepguard.verify(folder)
        assert found.files == 3 and not found.problems, found.problems

    def test_missing_shard(self, folder: Path) -> None:
        (folder / "model-00002-of-00003.safetensors").unlink()
        (error,) = stepguard.verify(folder).errors
        assert error.kind == "missing" and "model-00002-of-00003" in error.detail

    def test_missing_shard_without_an_index(self, folder: Path) -> None:
        (folder / "model-00002-of-00003.safetensors").unlink()
        (folder / "model.safetensors.index.json").unlink()
        (error,) = stepguard.verify(folder).errors
        assert error.kind == "missing" and "number 2" in error.detail

    def test_shard_that_is_a_copy_of_another(self, folder: Path) -> None:
        first = folder / "model-00001-of-00003.safetensors"
        (folder / "model-00002-of-00003.safetensors").write_bytes(first.read_bytes())
        kinds = {error.kind for error in stepguard.verify(folder).errors}
        assert kinds == {"duplicate", "index"}

    def test_tensor_that_no_shard_holds(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["lost.weight"] = "model-00001-of-00003.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (error,) = stepguard.verify(folder).errors
        assert (error.kind, error.tensor) == ("index", "lost.weight")

    def test_tensor_that_the_index_does_not_know(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        del index["weight_map"]["outer.bias"]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found = stepguard.verify(folder)
        assert found.ok and "outer.bias" in {
            warning.tensor for warning in found.warnings if warning.kind == "index"
        }

    def test_torn_index(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a":')
        assert {error.kind for error in stepguard.verify(folder).errors} == {"malformed"}

    def test_shard_left_behind_by_an_earlier_save(self, folder: Path) -> None:
        (folder / "model-00004-of-00004.safetensors").write_bytes(
            (folder / "model-00001-of-00003.safetensors").read_bytes()
        )
        found = stepguard.verify(folder)
        assert found.ok and any("does not name" in warning.detail for warning in found.warnings)

    def test_sharded_pickles(self, tmp_path: Path, everything: dict[str, Any]) -> None:
        state = everything["state_dict"]
        names = sorted(state)
        where = {}
        for number in range(2):
            file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
            torch.save({name: state[name] for name in names[number::2]}, tmp_path / file)
            where |= dict.fromkeys(names[number::2], file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
        assert stepguard.verify(tmp_path).ok
        del where[names[0]]
        torch.save({}, tmp_path / "pytorch_model-00002-of-00002.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
        assert {error.kind for error in stepguard.verify(tmp_path).errors} == {"index"}


class TestDcp:
    @pytest.fixture
    def folder(self, tmp_path: Path, everything: dict[str, Any]) -> Path:
        return saved.save_dcp(tmp_path / "dcp", {"model": everything["state_dict"]})

    def test_missing_file(self, folder: Path) -> None:
        (folder / "__0_0.distcp").unlink()
        (error,) = stepguard.verify(folder).errors
        assert error.kind == "missing" and "__0_0.distcp" in error.detail

    def test_truncated_file(self, folder: Path) -> None:
        file = folder / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-100])
        assert {error.kind for error in stepguard.verify(folder).errors} == {"torn"}

    def test_flipped_bit(self, folder: Path, everything: dict[str, Any]) -> None:
        file = folder / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        at = content.find(everything["state_dict"]["outer.weight"].numpy().tobytes())
        assert at > 0
        content[at + 5] ^= 4
        file.write_bytes(content)
        assert [error.kind for error in stepguard.verify(folder).errors] == ["checksum"]

    def test_torn_metadata(self, folder: Path) -> None:
        content = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(content[: len(content) // 2])
        assert {error.kind for error in stepguard.verify(folder).errors} <= {"torn", "malformed"}
        assert stepguard.verify(folder).corrupt

    def test_file_that_nobody_names(self, folder: Path) -> None:
        (folder / "__1_0.distcp").write_bytes(b"left over")
        found = stepguard.verify(folder)
        assert found.ok and any("__1_0.distcp" in warning.detail for warning in found.warnings)
