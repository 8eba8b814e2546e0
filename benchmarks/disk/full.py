"""A disk that fills up: what is left, does the newest state still load, and does a small save fit
afterwards?
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disk.formats import Format
from benchmarks.disk.states import state_at, step_of


@dataclass(frozen=True, slots=True)
class FullDisk:
    """What a format did when half a state of room was left after its second save."""

    saved: int
    """The last step that was reported saved."""
    loads: int | None
    """The step that a resume gets; None when it fails."""
    partial_bytes: int
    """What the failed save left behind."""
    small_save_fits: bool
    """Does a state of a tenth of the size fit now, and load?"""


def fill_up(make: Callable[[], Format], folder: Path, size: int) -> FullDisk | None:
    """Save until the disk is full; None where no small disk can be mounted."""
    form = make()
    state_bytes = 3 * 4 * size
    with small_disk(folder, 4 * state_bytes) as mounted:
        if not mounted:
            return None
        where, saved = folder / "run", 2
        for step in (1, 2):
            form.save(where, step, state_at(step, size))
        before = _used(where)
        (folder / "somebody-else").write_bytes(bytes(4 * state_bytes - before - state_bytes // 2))
        try:
            form.save(where, 3, state_at(3, size))
            saved = 3
        except Exception:
            pass
        partial = max(_used(where) - before, 0)
        loads = _loaded(make, where)
        try:
            make().save(where, 9, state_at(9, size // 10))
            fits = _loaded(make, where) == 9
        except Exception:
            fits = False
        return FullDisk(saved, loads, partial, fits)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A tmpfs of so many bytes; False where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _loaded(make: Callable[[], Format], folder: Path) -> int | None:
    try:
        state = make().load(folder)
        return None if state is None else step_of(state)
    except Exception:
        return None


def _used(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
