"""Our own checkpoints: everything against the seal, and the folder that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stepguard
from stepguard.check.quarantine import is_bad
from stepguard.checkpoints import Health, Store
from verification import saved
from verification.special import special_file

HEALTHY = Health(loss=1.0, level=1.1, steps_watched=50, incidents=0, good=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store(tmp_path / "checkpoints", keep=5)
    for step in (10, 20):
        tensors = {
            "model/inner.weight": torch.randn(64, 64),
            "model/mask": torch.full((4, 4), float("-inf")).triu(1),
            "optimizer/inner.weight/exp_avg": torch.randn(64, 64),
            "optimizer/inner.weight/exp_avg_sq": torch.rand(64, 64),
            "extra:ema/inner.weight": torch.randn(64, 64),
            "rng/0/torch": torch.get_rng_state(),
            "model/phase": torch.randn(8, dtype=torch.complex64),
        }
        store.save(step, tensors, {"nonfinite_ok": ["model/mask"], "note": "x"}, HEALTHY)
    return tmp_path / "checkpoints"


def test_sealed_checkpoints_are_good_and_their_roles_are_told(folder: Path) -> None:
    found = stepguard.verify(folder)
    assert found.ok and not found.problems, found.problems
    assert [(part.format, part.step) for part in found.parts] == [("sealed", 10), ("sealed", 20)]
    assert found.parts[0].roles == {"buffer": 1, "ema": 1, "optimizer": 2, "parameter": 2, "rng": 1}


def test_run_directory_around_it_is_walked(folder: Path) -> None:
    (folder.parent / "journal.jsonl").write_text("")
    assert len(stepguard.verify(folder.parent).parts) == 2


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7, 0.9, 0.999])
@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "facts.json", "seal.json"])
def test_flipped_bit_anywhere_is_found(folder: Path, name: str, share: float) -> None:
    file = folder / "step-20" / name
    content = bytearray(file.read_bytes())
    content[int(share * len(content))] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    found = stepguard.verify(folder)
    assert [part.corrupt for part in found.parts] == [False, True]


def test_altered_tensor_is_named(folder: Path) -> None:
    file = folder / "step-20" / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 8
    file.write_bytes(content)
    named = {
        problem.tensor
        for problem in stepguard.verify(folder / "step-20").errors
        if problem.kind == "checksum"
    }
    assert len(named - {None}) == 1 and None in named


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "facts.json"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / "step-20" / name).unlink()
    (error,) = stepguard.verify(folder / "step-20").errors
    assert error.kind == "missing" and name in error.detail


def test_truncated_file_is_torn(folder: Path) -> None:
    file = folder / "step-20" / "tensors-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "torn" in {error.kind for error in stepguard.verify(folder / "step-20").errors}


def test_file_the_seal_does_not_name_is_a_warning(folder: Path) -> None:
    (folder / "step-20" / "notes.txt").write_text("x")
    found = stepguard.verify(folder / "step-20")
    assert found.ok and [warning.kind for warning in found.warnings] == ["seal"]


def test_link_in_place_of_a_file_is_not_followed(folder: Path) -> None:
    file = folder / "step-20" / "tensors-00000.safetensors"
    file.rename(folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")
    assert {error.kind for error in stepguard.verify(folder / "step-20").errors} == {"link"}


def test_folder_without_its_seal_is_an_error(folder: Path) -> None:
    (folder / "step-20" / "seal.json").unlink()
    found = stepguard.verify(folder)
    assert not found.ok and any("no seal" in error.detail for error in found.errors)


def test_pointer_to_nothing_is_an_error(folder: Path) -> None:
    (folder / "last-good").write_text("step-999 " + 32 * "0" + "\n")
    assert any(
        error.kind == "seal" and "last-good" in error.file
        for error in stepguard.verify(folder).errors
    )


def test_state_that_was_sealed_as_diverged_is_neither_good_nor_corrupt(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    healthy = Health(loss=1.0, level=1.0, steps_watched=50, incidents=0, good=True)
    store.save(3, {"model/w": torch.ones(3)}, {}, healthy)
    diverged = replace(healthy, good=False, why="the loss is at 9000")
    store.save(5, {"model/w": torch.ones(3)}, {}, diverged)
    found = stepguard.verify(tmp_path / "checkpoints" / "step-5")
    assert found.diverged and not found.ok and not found.corrupt
    assert "the loss is at 9000" in found.errors[0].detail
    assert not is_bad(found)


def test_pointer_is_followed_to_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    healthy = Health(loss=1.0, level=1.0, steps_watched=50, incidents=0, good=True)
    path = Store(tmp_path).save(3, {"model/w": torch.ones(3)}, {}, healthy)
    pointer = tmp_path / "last-good"
    found = stepguard.verify(pointer)
    assert found.ok and found.step == 3
    assert (found.path, found.pointer) == (str(path), str(pointer))
    pointer.write_text("step-4 0\n")
    assert stepguard.verify(pointer).corrupt


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "fifo", "socket", "other.json"])
def test_seal_that_is_a_link_is_refused_without_reading(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "checkpoints" / "step-3"
    folder.mkdir(parents=True)
    saved.save_safetensors(folder / "model.safetensors", {"w": torch.ones(3)})
    with special_file(tmp_path, target) as where:
        (folder / "seal.json").symlink_to(where)
        found = stepguard.verify(tmp_path / "checkpoints")
    assert [error.kind for error in found.errors] == ["seal"] and "symbolic link" in found.errors[
        0
    ].detail
