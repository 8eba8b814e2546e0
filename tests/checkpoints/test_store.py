"""Saving: what is sealed, what `last-good` names, what stays when a save fails."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.disk.faults import Failing, Lying, Recorder
from benchmarks.disk.states import GOOD, facts_at, state_at

import forked
from checkpoints.kit import SIZE, held, names, saved
from stepguard._errors import StepguardError, StoreError
from stepguard.checkpoints import Store, files, read_seal
from stepguard.state.files import Operation

DOUBTFUL = replace(GOOD, good=False)


def test_checkpoint_has_seal_facts_and_tensors(tmp_path: Path) -> None:
    path = Store(tmp_path / "runs" / "checkpoints").save(
        7, state_at(7), {"config": {"lr": 0.1}}, GOOD
    )
    assert path == tmp_path / "runs" / "checkpoints" / "step-7"
    assert sorted(p.name for p in path.iterdir()) == [
        "facts.json",
        "seal.json",
        "tensors-00000.safetensors",
    ]
    seal = read_seal(path)
    assert (seal.step, seal.health, seal.config, seal.serial) == (7, GOOD, {"lr": 0.1}, 1)
    assert seal.versions["torch"] == torch.__version__
    assert (
        json.loads((path / "seal.json").read_text())["seal"]["tensors"]["model/weight"]["dtype"]
        == "float32"
    )


def test_health_that_is_not_a_number_is_sealed_as_it_is(tmp_path: Path) -> None:
    health = replace(DOUBTFUL, loss=math.inf, level=None)
    assert read_seal(Store(tmp_path).save(1, {}, {}, health)).health == health


LIMITED = """
import os, resource, sys
from pathlib import Path
import torch
from benchmarks.disk.states import GOOD
from stepguard.checkpoints import Store

work, folder, kind, spare = sys.argv[1:]
tensor = torch.ones(1).expand(4096, 4096) if kind == "expanded" else torch.ones(4096, 4096)
if kind == "transposed":
    tensor = tensor.t()
if work == "open":
    del tensor
used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + int(spare), used + int(spare)))
store = Store(Path(folder))
if work == "save":
    store.save(1, {"t": tensor}, {}, GOOD)
else:
    store.open()
"""
"""Of its own process: in one that has run other tests, freed memory would count as spare."""


@pytest.mark.parametrize("kind", ["contiguous", "expanded", "transposed"])
def test_neither_saving_nor_opening_needs_a_second_copy(kind: str, tmp_path: Path) -> None:
    size = 4 * 4096 * 4096

    def works(work: str, spare: int) -> bool:
        search = os.pathsep.join(filter(None, sys.path))
        words = ["-c", LIMITED, work, str(tmp_path), kind, str(spare)]
        ended = forked.python(words, variables={**os.environ, "PYTHONPATH": search})
        return ended.returncode == 0

    assert works("save", size // 2)
    assert works("open", size + size // 2)
    assert not works("open", size // 2)


def test_last_good_is_what_was_saved_last(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2)
    opened = store.open()
    assert held(opened) == 2
    assert (opened.health, opened.passed_over) == (GOOD, ())


def test_checkpoint_that_is_not_good_never_becomes_last_good(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1)
    store.save(2, state_at(2, SIZE), facts_at(2), DOUBTFUL)
    assert held(store.open()) == 1
    assert held(store.open("step-2")) == 2
    (tmp_path / "last-good").unlink()
    assert held(store.open()) == 1


def test_nothing_good_yet_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(2, state_at(2, SIZE), facts_at(2), DOUBTFUL)
    with pytest.raises(
        StoreError, match="holds no sealed good checkpoint; there is nothing to open"
    ):
        store.open()
    with pytest.raises(StoreError, match="does not exist; there is no checkpoint to open"):
        Store(tmp_path / "elsewhere").open()


def test_same_step_saved_again_after_a_rewind_is_the_newer_one(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    saved(store, 100, 120)
    store.save(100, {"model/weight": torch.full((3,), 5.0)}, {"turn": 2}, GOOD)
    assert store.open().facts == store.open("step-100").facts == {"turn": 2}
    assert [entry.path.name for entry in store.list()] == ["step-100-2", "step-120", "step-100"]


def test_everything_is_on_disk_before_the_name_and_the_name_before_the_pointer(
    tmp_path: Path,
) -> None:
    disk = Recorder()
    saved(Store(tmp_path, disk=disk), 5)
    done = [(op.kind, (op.target or op.path).name) for op in disk.operations]
    order = [
        done.index(("sync", "tensors-00000.safetensors")),
        done.index(("sync", "facts.json")),
        done.index(("create", "seal.json")),
        done.index(("sync", "seal.json")),
        next(
            i
            for i, (kind, name) in enumerate(done)
            if kind == "sync_folder" and name.endswith(".tmp")
        ),
        done.index(("rename", "step-5")),
        next(
            i
            for i, (kind, name) in enumerate(done)
            if (kind, name) == ("sync_folder", tmp_path.name)
        ),
        done.index(("rename", "last-good")),
    ]
    assert order == sorted(order)
    assert done[-1] == ("sync_folder", tmp_path.name)


def test_large_files_are_synced_as_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PACE", 4000)
    disk = Recorder()
    Store(tmp_path, disk=disk).save(1, {f"t{i}": torch.ones(1000) for i in range(5)}, {}, GOOD)
    kinds = [op.kind for op in disk.operations if op.path.suffix == ".safetensors"]
    assert kinds == ["create", "write", *(["write", "sync"] * 5), "sync"]


def _all_operations(folder: Path) -> list[Operation]:
    disk = Recorder()
    store = Store(folder, keep=1, disk=disk)
    saved(store, 1)
    disk.operations.clear()
    saved(store, 2)
    return disk.operations


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mkdir", "create", "write", "sync", "sync_folder", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_any_failing_operation_leaves_the_previous_checkpoint_and_nothing_else(
    kind: str, code: int, tmp_path: Path
) -> None:
    count = sum(op.kind == kind for op in _all_operations(tmp_path / "counted"))
    for number in range(count):
        folder = tmp_path / f"{number}"
        saved(Store(folder), 1)
        disk = Failing(kind, number=number, code=code, times=1)
        said: list[str] = []
        store = Store(folder, keep=1, disk=disk, say=said.append)
        try:
            saved(store, 2)
        except StoreError as fault:
            assert "the checkpoint of step 2 was not written" in str(fault)
            assert held(Store(folder).open()) == 1
        else:
            assert said, (
                "what does not end the save must be said: a rotation, or the very last sync"
            )
            assert held(Store(folder).open()) == 2
        assert disk.failed == 1
        saved(Store(folder, keep=1), 3)
        assert names(folder) == ["last-good", "step-3"]


def test_failing_save_says_what_failed_and_what_still_is_good(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    with pytest.raises(
        StepguardError, match=r"No space left on device.*last good checkpoint is still step-1\."
    ):
        saved(Store(tmp_path, disk=Failing("write", number=2, code=errno.ENOSPC)), 2)
    assert names(tmp_path) == ["last-good", "step-1"]
    with pytest.raises(StepguardError, match=r"there is no good checkpoint yet\."):
        saved(Store(tmp_path / "new", disk=Failing("sync")), 2)
    assert names(tmp_path / "new") == []


def test_interrupted_save_cleans_up_and_lets_the_interrupt_pass(tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def perform(self, operation, act):  # type: ignore[no-untyped-def]
            if operation.path.name == "facts.json":
                raise KeyboardInterrupt
            return super().perform(operation, act)

    saved(Store(tmp_path), 1)
    with pytest.raises(KeyboardInterrupt):
        saved(Store(tmp_path, disk=Interrupted()), 2)
    assert names(tmp_path) == ["last-good", "step-1"]


def test_disk_that_keeps_wrong_bytes_is_found_before_the_seal(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    for number in range(4):
        with pytest.raises(
            StoreError,
            match="reads back different from what was written; the disk cannot be trusted",
        ):
            saved(Store(tmp_path, disk=Lying(number)), 2)
    assert names(tmp_path) == ["last-good", "step-1"]


def test_litter_of_dead_writers_is_removed_by_the_next_save_and_nothing_else(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    saved(store, 1)
    for name in (".step-2.4711-0.tmp", ".step-1.4711-3.old", ".step-9-2.1-1.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".last-good.4711-5.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".step-7.tmp").mkdir()
    saved(store, 3)
    assert names(tmp_path) == [".step-7.tmp", "last-good", "notes.txt", "step-1", "step-3"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": 0}, "keep=0 would delete the last good checkpoint; use 1 or more"),
        ({"keep_every": 0}, "keep_every=0 is not a number of steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=words):
        Store(tmp_path, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.5, True, "7"])
def test_step_that_is_not_a_count_is_refused(step: object, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a number of optimizer steps"):
        Store(tmp_path).save(step, {}, {}, GOOD)  # type: ignore[arg-type]


def test_facts_that_are_not_json_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match="facts of a checkpoint must be plain JSON values: Object of type Tensor"
    ):
        Store(tmp_path).save(1, {}, {"x": torch.ones(1)}, GOOD)
    assert names(tmp_path) == []
