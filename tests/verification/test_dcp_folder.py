"""Folders of torch.distributed.checkpoint: whole, torn, and with pieces missing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from verification import saved
from verification.saved import poison


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

    def test_longer_file_of_another_save(self, folder: Path, everything: dict[str, Any]) -> None:
        larger = {"model": {**everything["state_dict"], "z.weight": torch.ones(64, 64)}}
        other = saved.save_dcp(folder.parent / "other", larger)
        (folder / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
        errors = stepguard.verify(folder).errors
        assert any("written by another save" in error.detail for error in errors)

    def test_file_that_is_not_named_is_a_warning(self, folder: Path) -> None:
        (folder / "__1_0.distcp").write_bytes(b"left over")
        found = stepguard.verify(folder)
        assert found.ok and any("__1_0.distcp" in warning.detail for warning in found.warnings)


def test_file_with_a_piece_of_another_shape_is_of_another_save(tmp_path: Path) -> None:
    folder = saved.save_dcp(tmp_path / "a", {"model": {"w": torch.ones(4, 6)}})
    other = saved.save_dcp(tmp_path / "b", {"model": {"w": torch.ones(6, 4)}})
    (folder / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    (error,) = stepguard.verify(folder).errors
    assert error.tensor == "model.w" and "[6, 4] here and [4, 6] in .metadata" in error.detail


def test_dcp_folder(tmp_path: Path, everything: dict[str, Any]) -> None:
    value = {"model": everything["state_dict"], "optim": everything["optimizer"], "note": "text"}
    found = stepguard.verify(saved.save_dcp(tmp_path / "dcp", value))
    assert found.ok and not found.problems, found.problems
    assert found.format == "DCP" and found.roles["optimizer"] == 18 and "parameter" in found.roles
    assert not [w for w in found.warnings if w.kind == "global"]


def test_nan_in_a_dcp_folder_is_found_by_name(tmp_path: Path, everything: dict[str, Any]) -> None:
    state = {
        **everything["state_dict"],
        "outer.bias": poison(everything["state_dict"]["outer.bias"]),
    }
    found = stepguard.verify(saved.save_dcp(tmp_path / "dcp", {"model": state}))
    assert [(error.kind, error.tensor) for error in found.errors] == [("nan", "model.outer.bias")]


def test_dcp_folder_without_its_metadata_is_a_save_that_never_finished(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    folder = saved.save_dcp(tmp_path / "dcp", {"model": everything["state_dict"]})
    (folder / ".metadata").unlink()
    for found in (stepguard.verify(folder), stepguard.verify(tmp_path)):
        (error,) = found.errors
        assert (
            error.kind == "missing"
            and ".metadata" in error.detail
            and "a finished save has" in error.detail
        )
        assert found.corrupt and len(found.leaves) == 1


def test_link_in_the_place_of_metadata_is_refused(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    folder = saved.save_dcp(tmp_path / "dcp", {"model": everything["state_dict"]})
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to("/dev/zero")
    (error,) = stepguard.verify(folder).errors
    assert error.kind == "link" and "not followed" in error.detail


def test_size_that_no_tensor_has_is_passed_over(tmp_path: Path) -> None:
    """An integer without end cannot even be printed."""
    folder = saved.save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(4)}})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        object.__setattr__(entry, "size", (1 << 8000,) * 4)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert stepguard.verify(folder).format == "DCP"
