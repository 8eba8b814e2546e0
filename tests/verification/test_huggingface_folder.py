"""Folders of transformers and accelerate: shards, their index, the trainer's state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from verification import saved


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

    @pytest.mark.parametrize("total", [10**9, 1e9, 10**4000, float("inf")])
    def test_index_that_promises_more_bytes_than_there_are(self, folder: Path, total: Any) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["metadata"]["total_size"] = total
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found = stepguard.verify(folder)
        assert found.ok and [warning.kind for warning in found.warnings] == ["index"]

    @pytest.mark.parametrize("total", [float("nan"), "many", None])
    def test_total_that_is_not_a_number_is_passed_over(self, folder: Path, total: Any) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["metadata"]["total_size"] = total
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert not stepguard.verify(folder).problems

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


def test_trainer_folder_is_one_checkpoint(tmp_path: Path, everything: dict[str, Any]) -> None:
    found = stepguard.verify(saved.save_trainer(tmp_path / "checkpoint-3", everything))
    assert found.ok and not found.problems, found.problems
    assert found.format == "transformers (safetensors)" and found.step == 3 and not found.parts
    assert {"parameter", "buffer", "optimizer", "rng"} <= found.roles.keys()


def test_loss_that_became_nan_in_the_trainers_log_is_a_warning(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    folder = saved.save_trainer(tmp_path / "checkpoint-3", everything)
    (folder / "trainer_state.json").write_text(
        '{"global_step": 3, "log_history": [{"loss": NaN, "step": 2}]}'
    )
    found = stepguard.verify(folder)
    assert found.ok and "loss" in {warning.kind for warning in found.warnings}
