"""Real disks that are full or read-only: the previous checkpoint stays, litter goes, training can
go on.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD, state_at

from checkpoints.kit import held, in_child, names, saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Background, Store

LARGE = 400_000


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of 3 MB; False where mounting is not allowed."""
    folder.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _overflow(folder: Path) -> None:
    """A good small checkpoint, a large one that does not fit, and a small one again, in the same
    folder.
    """
    said: list[str] = []
    store = Store(folder, keep=2)
    background = Background(store, said.append)
    saved(store, 1)
    background.offer(2, state_at(2, LARGE), {}, GOOD)
    assert background.wait() is None
    assert len(said) == 1 and "checkpoint of step 2 NOT saved, training continues" in said[0]
    assert "last good checkpoint is still step-1" in said[0]
    assert names(folder) == ["last-good", "step-1"]
    assert held(store.open()) == 1
    saved(store, 3)
    assert names(folder) == ["last-good", "step-1", "step-3"]


def _limited(folder: Path) -> None:
    """No file may grow beyond a megabyte: the same short writes and errors, without mounting
    anything.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    _overflow(folder)


def test_full_disk_keeps_the_previous_checkpoint_and_is_left_clean(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as mounted:
        if mounted:
            _overflow(tmp_path / "disk")
        else:
            assert in_child(lambda: _limited(tmp_path / "disk")) == 0


def test_file_size_limit_keeps_the_previous_checkpoint_and_is_left_clean(tmp_path: Path) -> None:
    assert in_child(lambda: _limited(tmp_path / "limited")) == 0


@contextmanager
def unwritable(folder: Path) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Make a folder read-only for this user: by mount for root, by permission for anybody else."""
    bind = subprocess.run(
        ["mount", "--bind", str(folder), str(folder)], capture_output=True, check=False
    ).returncode
    if bind == 0:
        subprocess.run(
            ["mount", "-o", "remount,ro,bind", str(folder)], check=True, capture_output=True
        )
    mode = folder.stat().st_mode
    if bind:
        folder.chmod(0o500)
    try:
        yield lambda work: _as_somebody(work, bind)
    finally:
        if bind:
            folder.chmod(mode)
        else:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _as_somebody(work: Callable[[], None], bind: int) -> None:
    """Permissions do not hold root back, so without a mount root steps down to nobody first."""

    def stepped_down() -> None:
        if bind and os.geteuid() == 0:
            os.setuid(65534)
        work()

    assert in_child(stepped_down) == 0


def test_read_only_folder_is_a_clear_error_and_can_still_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    saved(Store(folder), 1)
    before = names(folder)

    def refused() -> None:
        store = Store(folder)
        assert held(store.open()) == 1
        with pytest.raises(
            StoreError, match=r"checkpoint of step 2 was not written .*still step-1"
        ):
            saved(store, 2)

    with unwritable(folder) as run:
        run(refused)
    assert names(folder) == before
    saved(Store(folder), 3)
    assert held(Store(folder).open()) == 3


def test_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StoreError, match="was not written into"):
        Store(tmp_path / "checkpoints").save(1, {"t": torch.ones(1)}, {}, GOOD)
