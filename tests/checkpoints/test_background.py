"""A save that is slow, fails or loses its power costs no earlier checkpoint."""

from __future__ import annotations

import errno
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from benchmarks.disk.faults import Failing, Recorder
from benchmarks.disk.powerloss import FATES, DataFate, NameFate, Platter, prefixes
from benchmarks.disk.states import GOOD, facts_at, state_at

from checkpoints.kit import SIZE, held, names, saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Background, Store
from stepguard.checkpoints.seal import entry_of, read_pointer
from stepguard.state.files import Disk, Operation

Result = TypeVar("Result")


class Slow(Disk):
    """Does not start the first rename before it is told to."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        if operation.kind == "rename" and not self.go.is_set():
            self.reached.set()
            assert self.go.wait(60)
        return act()


def offered(background: Background, step: int) -> bool:
    return background.offer(step, state_at(step, SIZE), facts_at(step), GOOD)


def test_offered_state_is_saved(tmp_path: Path) -> None:
    store, said = Store(tmp_path), list[str]()
    background = Background(store, said.append)
    assert background.idle() and background.wait() is None
    for step in (1, 2):
        assert offered(background, step)
        assert background.wait() == tmp_path / f"step-{step}"
        assert background.idle()
    background.close()
    assert held(store.open()) == 2
    assert said == []


def test_slow_disk_refuses_offers_and_says_how_many(tmp_path: Path) -> None:
    disk, said = Slow(), list[str]()
    background = Background(Store(tmp_path, disk=disk), said.append)
    assert offered(background, 1)
    assert disk.reached.wait(60)
    assert not background.idle()
    assert [offered(background, step) for step in (2, 3)] == [False, False]
    disk.go.set()
    assert background.wait() == tmp_path / "step-1"
    assert said == ["saving step 1 took so long that 2 later saves were dropped."]
    assert offered(background, 4)
    background.close()
    assert names(tmp_path) == ["last-good", "step-1", "step-4"]


def test_reader_sees_the_previous_checkpoint_while_one_is_being_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, state_at(1, SIZE), facts_at(1), GOOD)
    disk = Slow()
    background = Background(Store(tmp_path, disk=disk), print)
    offered(background, 2)
    assert disk.reached.wait(60)
    opened = Store(tmp_path).open()
    assert (held(opened), opened.passed_over, len(store.list())) == (1, (), 1)
    disk.go.set()
    background.close()
    assert held(store.open()) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_failing_disk_is_reported_and_training_continues(code: int, tmp_path: Path) -> None:
    said = list[str]()
    disk = Failing("write", code=code, times=2)
    background = Background(Store(tmp_path, disk=disk), said.append)
    results = []
    for step in (1, 2, 3):
        assert offered(background, step)
        results.append(background.wait())
    assert results == [None, None, tmp_path / "step-3"]
    assert len(said) == 2
    assert said[0].startswith(
        "checkpoint of step 1 NOT saved, training continues: the checkpoint of step 1 was "
        "not written"
    )


def test_state_that_is_not_finite_is_said_and_not_saved(tmp_path: Path) -> None:
    said = list[str]()
    background = Background(Store(tmp_path), said.append)
    background.offer(1, {"model/w": torch.tensor([1.0, float("nan")])}, {}, GOOD)
    assert background.wait() is None
    assert "not sealed: model/w holds NaN or Inf" in said[0]
    assert names(tmp_path) == []


def test_tensors_are_not_copied_and_let_go_afterwards(tmp_path: Path) -> None:
    disk = Slow()
    background = Background(Store(tmp_path, disk=disk), print)
    tensor = torch.ones(4)
    there = weakref.ref(tensor)
    background.offer(1, {"t": tensor}, {}, GOOD)
    del tensor
    assert there() is not None
    disk.go.set()
    background.wait()
    assert there() is None


# --- power cuts: what was never synced is dropped or zeroed


def _recorded(folder: Path) -> tuple[list[Operation], list[int]]:
    """The operations of four saves with rotation, and after how many of them each save had
    returned.
    """
    disk = Recorder()
    folder.mkdir()
    store = Store(folder, keep=1, keep_every=2, disk=disk)
    returned = []
    for step in (1, 2, 3, 4):
        saved(store, step)
        returned.append(len(disk.operations))
    store.close()
    return disk.operations, returned


@pytest.mark.slow
@pytest.mark.parametrize(("data", "entries"), FATES)
def test_power_cut_after_any_operation_leaves_what_was_acknowledged(
    data: DataFate, entries: NameFate, tmp_path: Path
) -> None:
    operations, returned = _recorded(tmp_path / "recorded")
    where = tmp_path / "left"
    for number, platter in prefixes(tmp_path / "recorded", operations):
        platter.lay_out(where, data, entries)
        acknowledged = sum(count <= number for count in returned)
        if acknowledged:
            assert entry_of(read_pointer(where)).good
            opened = Store(where).open()
            assert opened.passed_over == ()
            assert acknowledged <= held(opened) <= acknowledged + 1
        else:
            assert _step_or_none(where) in (None, 1)
        saved(Store(where, keep=1), 9)
        assert held(Store(where).open()) == 9
        assert not [name for name in names(where) if name.startswith(".")]
        shutil.rmtree(where)


def _step_or_none(folder: Path) -> int | None:
    try:
        return held(Store(folder).open())
    except StoreError:
        return None


def test_the_model_of_a_power_cut_loses_what_was_not_synced(tmp_path: Path) -> None:
    disk, root = Recorder(), tmp_path / "root"
    root.mkdir()
    with disk.new_file(root / "synced") as file:
        file.write(b"abc")
        file.sync()
        file.write(b"def")
    disk.sync_folder(root)
    disk.rename(root / "synced", root / "renamed")
    platter = Platter(root)
    for operation in disk.operations:
        platter.apply(operation)
    left = {}
    for data, entries in FATES:
        where = tmp_path / f"{data}-{entries}"
        platter.lay_out(where, data, entries)
        left[data, entries] = {path.name: path.read_bytes() for path in where.iterdir()}
    assert left["dropped", "dropped"] == {"synced": b"abc"}
    assert left["zeroed", "kept"] == {"renamed": b"abc\0\0\0"}
    assert left["kept", "newest"] == {"renamed": b"abcdef"}
