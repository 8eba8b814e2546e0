"""Folders: what is found in one; transformers, DCP and sealed folders, whole and damaged."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from check import saved
from check.saved import poison, special_file
from stepguard._errors import StoreError
from stepguard.check.quarantine import is_bad
from stepguard.check.verify import seal_folder
from stepguard.checkpoints import Health, Store
from stepguard.records.checks import Verification

HEALTHY = Health(loss=1.0, level=1.1, steps_watched=50, incidents=0, good=True)
NAN = float("nan")


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    return saved.trained()


def kinds(found: Verification) -> list[str]:
    return [error.kind for error in found.errors]


# --- Which checkpoints a folder holds, and what is passed over.


def test_everything_below_a_folder_is_found_and_told_apart(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    saved.save_trainer(tmp_path / "out" / "checkpoint-20", everything)
    saved.save_trainer(tmp_path / "out" / "checkpoint-100", everything)
    saved.save_dcp(tmp_path / "dcp", {"model": everything["state_dict"]})
    saved.save_zip(tmp_path / "last.ckpt", saved.lightning(everything))
    bad = {**everything["state_dict"], "outer.bias": torch.tensor([NAN])}
    saved.save_safetensors(tmp_path / "best.safetensors", bad)
    planned: list[int] = []
    done: list[int] = []
    found = stepguard.verify(
        tmp_path, plan=lambda count, size: planned.append(size), progress=done.append
    )
    names = [Path(part.path).name for part in found.parts]
    assert names == ["best.safetensors", "dcp", "last.ckpt", "checkpoint-20", "checkpoint-100"]
    assert [part.ok for part in found.parts] == [False, True, True, True, True]
    assert [problem.tensor for problem in found.errors] == ["outer.bias"]
    assert found.format == "folder" and found.tensors == sum(part.tensors for part in found.parts)
    assert sum(done) == sum(planned) > 0


def test_file_that_is_not_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "vocab.bin").write_bytes(bytes(range(200)))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "data.pkl").write_bytes(b"\x13\x37 something else")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.pt").write_bytes(b"half written")
    # the evidence of a bad step
    (tmp_path / "journal.jsonl").write_text("")
    capsule = tmp_path / "incidents" / "000-0" / "capsule"
    capsule.mkdir(parents=True)
    saved.save_safetensors(capsule / "state.safetensors", {"x": torch.tensor([NAN])})
    with pytest.raises(stepguard.ConfigError, match="nothing to verify"):
        stepguard.verify(tmp_path)
    with pytest.raises(stepguard.ConfigError, match="does not exist"):
        stepguard.verify(tmp_path / "nothing.pt")


def test_weights_file_of_zeros_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(5000))
    assert kinds(stepguard.verify(tmp_path)) == ["torn"]


def test_link_inside_the_folder_is_seen_once_and_a_given_one_is_read(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    saved.save_zip(tmp_path / "epoch=1.ckpt", everything)
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    found = stepguard.verify(tmp_path)
    assert len(found.parts) == 1 and not found.problems
    assert stepguard.verify(tmp_path / "last.ckpt").tensors > 0


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
    assert kinds(found) == ["link"] and "not opened" in found.errors[0].detail
    assert kinds(directly) == ["unreadable"]


# --- transformers and accelerate.

SECOND = "model-00002-of-00003.safetensors"
FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path, everything: dict[str, Any]) -> Path:
    return saved.save_sharded(tmp_path / "model", everything["state_dict"], shards=3)


def test_missing_shard_is_an_error_with_an_index_and_without(sharded: Path) -> None:
    found = stepguard.verify(sharded)
    assert found.files == 3 and not found.problems, found.problems
    (sharded / SECOND).unlink()
    (error,) = stepguard.verify(sharded).errors
    assert error.kind == "missing" and "model-00002-of-00003" in error.detail
    (sharded / INDEX).unlink()
    (error,) = stepguard.verify(sharded).errors
    assert error.kind == "missing" and "shard 2 of the 3 shards" in error.detail


def test_shard_that_is_a_copy_or_left_behind_is_told(sharded: Path) -> None:
    (sharded / "model-00004-of-00004.safetensors").write_bytes((sharded / FIRST).read_bytes())
    found = stepguard.verify(sharded)
    assert found.ok and any("does not name" in warning.detail for warning in found.warnings)
    (sharded / SECOND).write_bytes((sharded / FIRST).read_bytes())
    assert set(kinds(stepguard.verify(sharded))) == {"duplicate", "index"}


def test_index_that_knows_too_much_or_too_little_is_told(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["outer.bias"]
    (sharded / INDEX).write_text(json.dumps(index))
    found = stepguard.verify(sharded)
    unknown = {warning.tensor for warning in found.warnings if warning.kind == "index"}
    assert found.ok and "outer.bias" in unknown
    index["weight_map"]["lost.weight"] = FIRST
    (sharded / INDEX).write_text(json.dumps(index))
    (error,) = stepguard.verify(sharded).errors
    assert (error.kind, error.tensor) == ("index", "lost.weight")
    (sharded / INDEX).write_text('{"weight_map": {"a":')
    assert kinds(stepguard.verify(sharded)) == ["malformed"]


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        *((total, ["index"]) for total in (10**9, 1e9, 10**4000, float("inf"))),
        *((total, []) for total in (NAN, "many", None)),
    ],
)
def test_index_that_promises_more_bytes_than_there_are_is_a_warning(
    sharded: Path, total: Any, expected: list[str]
) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["metadata"]["total_size"] = total
    (sharded / INDEX).write_text(json.dumps(index))
    found = stepguard.verify(sharded)
    assert found.ok and [warning.kind for warning in found.warnings] == expected


def test_sharded_pickles_are_read(tmp_path: Path, everything: dict[str, Any]) -> None:
    state = everything["state_dict"]
    names = sorted(state)
    where = {}
    for number in range(2):
        file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save({name: state[name] for name in names[number::2]}, tmp_path / file)
        where |= dict.fromkeys(names[number::2], file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert stepguard.verify(tmp_path).ok
    torch.save({}, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert set(kinds(stepguard.verify(tmp_path))) == {"index"}


def test_trainer_folder_is_one_checkpoint_and_a_nan_in_its_log_a_warning(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    folder = saved.save_trainer(tmp_path / "checkpoint-3", everything)
    found = stepguard.verify(folder)
    assert found.ok and not found.problems, found.problems
    assert found.format == "transformers (safetensors)" and found.step == 3 and not found.parts
    assert {"parameter", "buffer", "optimizer", "rng"} <= found.roles.keys()
    (folder / "trainer_state.json").write_text(
        '{"global_step": 3, "log_history": [{"loss": NaN, "step": 2}]}'
    )
    found = stepguard.verify(folder)
    assert found.ok and "loss" in {warning.kind for warning in found.warnings}


# --- torch.distributed.checkpoint, with a seal or without.

PIECES = "__0_0.distcp"


@pytest.fixture
def dcp(tmp_path: Path, everything: dict[str, Any]) -> Path:
    return saved.save_dcp(tmp_path / "dcp", {"model": everything["state_dict"]})


def test_dcp_folder_is_read_with_all_its_roles(tmp_path: Path, everything: dict[str, Any]) -> None:
    value = {"model": everything["state_dict"], "optim": everything["optimizer"], "note": "text"}
    found = stepguard.verify(saved.save_dcp(tmp_path / "dcp", value))
    assert found.ok and not found.problems, found.problems
    assert found.format == "DCP" and found.roles["optimizer"] == 18 and "parameter" in found.roles
    value["model"] = {**value["model"], "outer.bias": poison(value["model"]["outer.bias"])}
    found = stepguard.verify(saved.save_dcp(tmp_path / "dcp", value))
    assert [(error.kind, error.tensor) for error in found.errors] == [("nan", "model.outer.bias")]


def flip_weight(folder: Path) -> None:
    content = bytearray((folder / PIECES).read_bytes())
    weight = saved.trained()["state_dict"]["outer.weight"].numpy().tobytes()
    content[content.index(weight) + 5] ^= 4
    (folder / PIECES).write_bytes(content)


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("damage", "expected", "words"),
    [
        (lambda folder: (folder / PIECES).unlink(), {"missing"}, PIECES),
        (lambda folder: halve(folder / PIECES), {"torn"}, ""),
        (flip_weight, {"checksum"}, "bytes have changed"),
        (lambda folder: halve(folder / ".metadata"), {"torn"}, ""),
        (lambda folder: replace_by_link(folder / ".metadata"), {"link"}, "not followed"),
        (lambda folder: (folder / ".metadata").unlink(), {"missing"}, "a finished save has"),
    ],
    ids=["no file", "cut", "flipped", "cut metadata", "link", "never finished"],
)
def test_damaged_dcp_folder_is_told(
    dcp: Path, damage: Callable[[Path], None], expected: set[str], words: str
) -> None:
    damage(dcp)
    for found in (stepguard.verify(dcp), stepguard.verify(dcp.parent)):
        assert set(kinds(found)) == expected
        assert found.corrupt and words in found.errors[0].detail


def test_file_of_another_save_is_found_by_its_length_and_by_its_shapes(tmp_path: Path) -> None:
    folder = saved.save_dcp(tmp_path / "a", {"model": {"w": torch.ones(4, 6)}})
    for other, words in (
        ({"w": torch.ones(4, 6), "z": torch.ones(64, 64)}, "written by another save"),
        ({"w": torch.ones(6, 4)}, "[6, 4] here and [4, 6] in .metadata"),
    ):
        source = saved.save_dcp(tmp_path / "b", {"model": other})
        (folder / PIECES).write_bytes((source / PIECES).read_bytes())
        assert any(words in error.detail for error in stepguard.verify(folder).errors)


def test_file_that_is_not_named_is_a_warning(dcp: Path) -> None:
    (dcp / "__1_0.distcp").write_bytes(b"left over")
    found = stepguard.verify(dcp)
    assert found.ok and any("__1_0.distcp" in warning.detail for warning in found.warnings)


def test_size_that_no_tensor_has_is_passed_over(dcp: Path) -> None:
    """An integer without end cannot even be printed."""
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        object.__setattr__(entry, "size", (1 << 8000,) * 4)
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    assert stepguard.verify(dcp).format == "DCP"


def test_sealed_dcp_folder_is_good_and_what_is_changed_or_gone_is_found(tmp_path: Path) -> None:
    folder = saved.save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(4)}})
    (folder / "note.txt").write_text("mine")
    seal_folder(folder, step=7)
    found = stepguard.verify(folder)
    assert found.ok and not found.problems and found.format == "DCP", found.problems
    state = {"model": {"w": torch.zeros(4)}}
    saved.load_dcp(folder, state)
    assert state["model"]["w"].tolist() == [1.0] * 4
    (folder / "note.txt").unlink()
    (error,) = stepguard.verify(folder).errors
    assert error.kind == "missing" and "note.txt" in error.detail
    # of another step, with the same sizes
    saved.save_dcp(folder, {"model": {"w": torch.full((4,), 2.0)}})
    assert "checksum" in kinds(stepguard.verify(folder))
    seal = seal_folder(folder)
    assert stepguard.verify(folder).ok
    seal.write_bytes(seal.read_bytes()[:-10])
    assert kinds(stepguard.verify(folder)) == ["seal"]


def test_what_is_not_good_is_not_sealed(tmp_path: Path) -> None:
    bad = saved.save_dcp(tmp_path / "bad", {"model": {"w": torch.tensor([1.0, NAN])}})
    with pytest.raises(StoreError, match=r"model\.w"):
        seal_folder(bad)
    (bad / ".metadata").unlink()
    with pytest.raises(StoreError, match="never finished"):
        seal_folder(bad)
    assert not (bad / "seal.json").exists()


# --- Checkpoints of stepguard, and the folder that holds them.

TENSORS = "tensors-00000.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    kept = Store(tmp_path / "checkpoints", keep=5)
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
        kept.save(step, tensors, {"nonfinite_ok": ["model/mask"], "note": "x"}, HEALTHY)
    return tmp_path / "checkpoints"


def test_sealed_checkpoints_are_good_and_their_roles_are_told(store: Path) -> None:
    (store.parent / "journal.jsonl").write_text("")
    for found in (stepguard.verify(store), stepguard.verify(store.parent)):
        assert found.ok and not found.problems, found.problems
        assert [(part.format, part.step) for part in found.parts] == [
            ("sealed", 10),
            ("sealed", 20),
        ]
    roles = {"buffer": 1, "ema": 1, "optimizer": 2, "parameter": 2, "rng": 1}
    assert found.parts[0].roles == roles


@pytest.mark.parametrize("name", [TENSORS, "facts.json", "seal.json"])
def test_flipped_bit_anywhere_is_found(store: Path, name: str) -> None:
    file = store / "step-20" / name
    whole = file.read_bytes()
    file.chmod(0o644)
    for share in (0.02, 0.3, 0.5, 0.7, 0.9, 0.999):
        content = bytearray(whole)
        content[int(share * len(content))] ^= 1
        file.write_bytes(content)
        found = stepguard.verify(store)
        assert [part.corrupt for part in found.parts] == [False, True], share
    if name == TENSORS:
        altered = {error.tensor for error in found.errors if error.kind == "checksum"}
        assert len(altered - {None}) == 1 and None in altered


def test_damaged_sealed_checkpoint_is_told(store: Path) -> None:
    folder = store / "step-20"
    (folder / "notes.txt").write_text("x")
    found = stepguard.verify(folder)
    assert found.ok and [warning.kind for warning in found.warnings] == ["seal"]
    whole = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(whole[:-1])
    assert "torn" in kinds(stepguard.verify(folder))
    (folder / TENSORS).rename(store.parent / "elsewhere.safetensors")
    (folder / TENSORS).symlink_to(store.parent / "elsewhere.safetensors")
    assert set(kinds(stepguard.verify(folder))) == {"link"}
    (folder / TENSORS).unlink()
    (error,) = stepguard.verify(folder).errors
    assert error.kind == "missing" and TENSORS in error.detail
    (folder / "seal.json").unlink()
    found = stepguard.verify(store)
    assert not found.ok and any("no seal" in error.detail for error in found.errors)


def test_state_that_was_sealed_as_diverged_is_neither_good_nor_corrupt(tmp_path: Path) -> None:
    kept = Store(tmp_path / "checkpoints")
    kept.save(3, {"model/w": torch.ones(3)}, {}, HEALTHY)
    diverged = replace(HEALTHY, good=False, why="the loss is at 9000")
    kept.save(5, {"model/w": torch.ones(3)}, {}, diverged)
    found = stepguard.verify(tmp_path / "checkpoints" / "step-5")
    assert found.diverged and not found.ok and not found.corrupt
    assert "the loss is at 9000" in found.errors[0].detail
    assert not is_bad(found)


def test_pointer_is_followed_to_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    path = Store(tmp_path).save(3, {"model/w": torch.ones(3)}, {}, HEALTHY)
    pointer = tmp_path / "last-good"
    found = stepguard.verify(pointer)
    assert found.ok and found.step == 3
    assert (found.path, found.pointer) == (str(path), str(pointer))
    for broken in ("step-4 0\n", "step-999 " + 32 * "0" + "\n"):
        pointer.write_text(broken)
        assert stepguard.verify(pointer).corrupt
        errors = stepguard.verify(tmp_path).errors
        assert any(error.kind == "seal" and "last-good" in error.file for error in errors)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "fifo", "socket", "other.json"])
def test_seal_that_is_a_link_is_refused_without_reading(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "checkpoints" / "step-3"
    folder.mkdir(parents=True)
    saved.save_safetensors(folder / "model.safetensors", {"w": torch.ones(3)})
    with special_file(tmp_path, target) as where:
        (folder / "seal.json").symlink_to(where)
        found = stepguard.verify(tmp_path / "checkpoints")
    assert kinds(found) == ["seal"] and "symbolic link" in found.errors[0].detail
