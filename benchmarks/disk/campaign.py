"""Kills writers at random instants, again and again in one folder, and looks at what they leave.

One forked writer a try: it resumes, then saves step after step until it is killed with SIGKILL.
What it had begun and what it had been told was saved lies in memory shared with the parent, so the
judge is not the one who dies.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.disk.formats import Format, Sealed
from benchmarks.disk.states import state_at, step_of
from stepguard.state.files import Disk, Operation

Result = TypeVar("Result")
KINDS = (
    "resume",
    "between",
    "mkdir",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "unlink",
    "rmdir",
    "save",
)
SAVES = 3
"""Saves of a writer that nobody kills; the instant of death is uniform over such a life."""


class Shared:
    """Three numbers in memory shared with the child: step begun, step saved, what it is doing."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 24)

    def write(self, index: int, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * index, value)

    def read(self, index: int) -> int:
        value: int = struct.unpack_from("<q", self._memory, 8 * index)[0]
        return value


class Told(Disk):
    """Tells what it is about to do."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        self.shared.write(2, KINDS.index(operation.kind))
        return act()


@dataclass(slots=True)
class Tally:
    """What a campaign found."""

    runs: int = 0
    killed: int = 0
    newest_unusable: int = 0
    """The newest state does not load: a resume fails until somebody deletes it."""
    all_lost: int = 0
    """Nothing loads although something had been saved."""
    mixed: int = 0
    """It loads, without a word, as parts of different steps."""
    went_back: int = 0
    """It loads as an older step than one that had been reported saved."""
    litter_bytes: int = 0
    """The most that lay beside what loads, at a restart."""
    killed_during: dict[str, int] = field(default_factory=dict)
    first_failure: str = ""


def campaign(
    make: Callable[[], Format],
    folder: Path,
    *,
    runs: int,
    size: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Tally:
    """Kill and look, `runs` times in one folder."""
    rng, tally, shared = random.Random(seed), Tally(), Shared()
    life = _life(make, folder, size, shared)
    saved = _reset(make, folder, size)
    for _ in range(runs):
        tally.runs += 1
        shared.write(0, saved)
        shared.write(1, saved)
        shared.write(2, 0)
        child = _start(make, folder, size, shared, rounds=10**9)
        try:
            time.sleep(rng.uniform(0, life))
        finally:
            os.kill(child, signal.SIGKILL)
        tally.killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        doing = KINDS[shared.read(2)]
        tally.killed_during[doing] = tally.killed_during.get(doing, 0) + 1
        saved = _judge(make, folder, size, shared, tally)
        progress()
    return tally


def _judge(
    make: Callable[[], Format], folder: Path, size: int, shared: Shared, tally: Tally
) -> int:
    """Load as a user would; the step to go on from."""
    begun, saved = shared.read(0), shared.read(1)
    form = make()
    tally.litter_bytes = max(tally.litter_bytes, _bytes(folder) - _expected_bytes(form, folder))
    try:
        state = form.load(folder)
    except Exception as fault:
        tally.newest_unusable += 1
        words = f"{type(fault).__name__}: {fault}".replace(str(folder), folder.name)
        tally.first_failure = tally.first_failure or words[:200]
        return _fall_back(make, folder, size, tally, saved)
    found = None if state is None else step_of(state)
    if state is None:
        tally.all_lost += 1
        return _reset(make, folder, size)
    if found is None:
        tally.mixed += 1
        return _reset(make, folder, size)
    if not saved <= found <= begun:
        tally.went_back += 1
    return found


def _fall_back(
    make: Callable[[], Format], folder: Path, size: int, tally: Tally, saved: int
) -> int:
    """Delete the newest by hand until something loads."""
    for _ in range(4):
        with suppress(Exception):
            make().discard_newest(folder)
        with suppress(Exception):
            state = make().load(folder)
            if state is None:
                break
            if (found := step_of(state)) is not None:
                return found
    tally.all_lost += 1
    return _reset(make, folder, size)


def _reset(make: Callable[[], Format], folder: Path, size: int) -> int:
    """An empty folder with one state in it."""
    shutil.rmtree(folder, ignore_errors=True)
    make().save(folder, 1, state_at(1, size))
    return 1


def _start(make: Callable[[], Format], folder: Path, size: int, shared: Shared, rounds: int) -> int:
    """Fork a writer; it ends when its parent does."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        _write(make(), folder, size, shared, rounds, parent)
    finally:
        os._exit(0)


def _write(form: Format, folder: Path, size: int, shared: Shared, rounds: int, parent: int) -> None:
    if isinstance(form, Sealed):
        form.disk = Told(shared)
    state = form.load(folder)
    step = (step_of(state) or 0) if state is not None else 0
    for _ in range(rounds):
        if os.getppid() != parent:
            return
        step += 1
        state = state_at(step, size)
        shared.write(0, step)
        shared.write(2, KINDS.index("save"))
        form.save(folder, step, state)
        shared.write(1, step)
        shared.write(2, KINDS.index("between"))


def _life(make: Callable[[], Format], folder: Path, size: int, shared: Shared) -> float:
    """Seconds of a writer that resumes and saves a few times: the longer of two tries."""
    longest = 0.0
    for _ in range(2):
        _reset(make, folder, size)
        begin = time.perf_counter()
        os.waitpid(_start(make, folder, size, shared, rounds=SAVES), 0)
        longest = max(longest, time.perf_counter() - begin)
    return longest


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _expected_bytes(form: Format, folder: Path) -> int:
    """What lies under the names a user knows."""
    names = ("checkpoint.pt", "model.pt", "optimizer.pt", "last-good")
    known = [path for path in folder.glob("*") if path.name in names or _of_a_step(path)]
    return sum(_bytes(path) if path.is_dir() else path.stat().st_size for path in known)


def _of_a_step(path: Path) -> bool:
    return path.is_dir() and path.name.partition("-")[0] in ("step", "checkpoint")
