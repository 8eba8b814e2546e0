"""A sealed folder of torch.distributed.checkpoint: a file of another save is found by its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stepguard
from stepguard._errors import StoreError
from stepguard.check.verify import seal_folder
from verification import saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved.save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(4)}})


def test_sealed_folder_is_good_and_loads_as_before(folder: Path) -> None:
    seal_folder(folder, step=7)
    found = stepguard.verify(folder)
    assert found.ok and not found.problems and found.format == "DCP", found.problems
    state = {"model": {"w": torch.zeros(4)}}
    saved.load_dcp(folder, state)
    assert state["model"]["w"].tolist() == [1.0] * 4


def test_file_of_another_step_with_the_same_sizes_is_found(folder: Path) -> None:
    seal_folder(folder)
    other = saved.save_dcp(folder.parent / "other", {"model": {"w": torch.full((4,), 2.0)}})
    (folder / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    assert [error.kind for error in stepguard.verify(folder).errors] == ["checksum"]


def test_file_that_is_gone_or_was_added_is_found(folder: Path) -> None:
    (folder / "note.txt").write_text("mine")
    seal_folder(folder)
    (folder / "note.txt").unlink()
    (error,) = stepguard.verify(folder).errors
    assert error.kind == "missing" and "note.txt" in error.detail


def test_folder_is_sealed_again_after_the_next_save(folder: Path) -> None:
    seal_folder(folder)
    saved.save_dcp(folder, {"model": {"w": torch.zeros(4)}})
    assert not stepguard.verify(folder).ok
    seal_folder(folder)
    assert stepguard.verify(folder).ok


def test_nan_is_not_sealed(tmp_path: Path) -> None:
    bad = saved.save_dcp(tmp_path / "bad", {"model": {"w": torch.tensor([1.0, torch.nan])}})
    with pytest.raises(StoreError, match=r"model\.w"):
        seal_folder(bad)
    assert not (bad / "seal.json").exists()


def test_save_that_never_finished_is_not_sealed(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(StoreError, match="never finished"):
        seal_folder(folder)


def test_damaged_seal_is_an_error(folder: Path) -> None:
    seal = seal_folder(folder)
    seal.write_bytes(seal.read_bytes()[:-10])
    assert [error.kind for error in stepguard.verify(folder).errors] == ["seal"]
