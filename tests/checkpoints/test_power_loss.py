"""Power cuts: every prefix of the recorded operations is opened with what was never synced dropped
or zeroed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks.disk.faults import Recorder
from benchmarks.disk.powerloss import FATES, DataFate, NameFate, Platter, prefixes

from checkpoints.kit import held, names, saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Store
from stepguard.checkpoints.seal import entry_of, read_pointer
from stepguard.state.files import Operation

pytestmark = pytest.mark.slow


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
