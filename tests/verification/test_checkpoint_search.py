"""Which checkpoints a folder holds, and what is passed over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from verification import saved
from verification.special import special_file


def test_everything_below_a_folder_is_found_and_told_apart(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    saved.save_trainer(tmp_path / "out" / "checkpoint-20", everything)
    saved.save_trainer(tmp_path / "out" / "checkpoint-100", everything)
    saved.save_dcp(tmp_path / "dcp", {"model": everything["state_dict"]})
    saved.save_zip(tmp_path / "last.ckpt", saved.lightning(everything))
    bad = {**everything["state_dict"], "outer.bias": torch.tensor([float("nan")])}
    saved.save_safetensors(tmp_path / "best.safetensors", bad)
    found = stepguard.verify(tmp_path)
    assert [Path(part.path).name for part in found.parts] == [
        "best.safetensors",
        "dcp",
        "last.ckpt",
        "checkpoint-20",
        "checkpoint-100",
    ]
    assert [part.ok for part in found.parts] == [False, True, True, True, True]
    assert [problem.tensor for problem in found.errors] == ["outer.bias"]
    assert found.format == "folder" and found.tensors == sum(part.tensors for part in found.parts)


def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "vocab.bin").write_bytes(bytes(range(200)))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "data.pkl").write_bytes(b"\x13\x37 something else")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.pt").write_bytes(b"half written")
    with pytest.raises(stepguard.ConfigError, match="nothing to verify"):
        stepguard.verify(tmp_path)


def test_weights_file_of_zeros_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(5000))
    assert [error.kind for error in stepguard.verify(tmp_path).errors] == ["torn"]


def test_evidence_of_bad_steps_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("")
    saved_in = tmp_path / "incidents" / "000-0" / "capsule"
    saved_in.mkdir(parents=True)
    saved.save_safetensors(saved_in / "state.safetensors", {"x": torch.tensor([float("nan")])})
    with pytest.raises(stepguard.ConfigError, match="nothing to verify"):
        stepguard.verify(tmp_path)


def test_link_inside_the_folder_is_seen_once(tmp_path: Path, everything: dict[str, Any]) -> None:
    saved.save_zip(tmp_path / "epoch=1.ckpt", everything)
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    found = stepguard.verify(tmp_path)
    assert (len(found.parts) == 1 and not found.problems) or {p.kind for p in found.problems} == {
        "inf"
    }


def test_snapshot_of_the_hub_cache_is_followed_into_its_blobs(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    blobs, snapshot = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    saved.save_safetensors(blobs / "1234", everything["state_dict"])
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "config.json").write_text("{}")
    found = stepguard.verify(snapshot)
    assert found.ok and found.tensors == len(everything["state_dict"])


def test_file_given_by_a_link_is_read(tmp_path: Path, everything: dict[str, Any]) -> None:
    saved.save_zip(tmp_path / "real.pt", everything)
    (tmp_path / "link.pt").symlink_to("real.pt")
    assert stepguard.verify(tmp_path / "link.pt").tensors > 0


def test_unreadable_folder_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    (tmp_path / "locked").mkdir()
    real = os.scandir

    def scandir(path: Path) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = stepguard.verify(tmp_path)
    assert found.ok and [warning.kind for warning in found.warnings] == ["unreadable"]


@pytest.mark.parametrize("target", ["/dev/zero", "fifo", "socket"])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_weights_that_are_a_link_to_no_file_are_an_error(
    tmp_path: Path, target: str, name: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with special_file(tmp_path, target) as where:
        (folder / name).symlink_to(where)
        found, directly = stepguard.verify(folder), stepguard.verify(folder / name)
    assert [error.kind for error in found.errors] == ["link"] and "not opened" in found.errors[
        0
    ].detail
    assert [error.kind for error in directly.errors] == ["unreadable"]
