"""Every operation of a save, a rotation and a resume is a kill point, and all of them are tried.

A child process resumes from `last-good` and saves the next steps; it is killed before, in the
middle of, or after its n-th operation. The next child goes on in the same folder, litter included.
What must be there is known out here.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from benchmarks.disk.faults import MOMENTS, Dying, Moment, Recorder
from benchmarks.disk.states import GOOD, facts_at, state_at

from checkpoints.kit import SIZE, held, in_child, names, saved
from stepguard.checkpoints import Store
from stepguard.checkpoints.seal import entry_of, read_pointer


def _resume_and_save(folder: Path, disk: Dying | Recorder, steps: int) -> None:
    store = Store(folder, keep=1, keep_every=7, disk=disk)
    step = held(store.open())
    for next_step in range(step + 1, step + 1 + steps):
        store.save(next_step, state_at(next_step, SIZE), facts_at(next_step), GOOD)


def _save_doubtful(folder: Path, disk: Dying, step: int) -> None:
    Store(folder, disk=disk).save(step, state_at(step), {}, replace(GOOD, good=False))


def _check(folder: Path, earliest: int, latest: int) -> int:
    """Last-good names a sealed checkpoint, opens without falling back, and holds exactly what was
    saved.
    """
    assert entry_of(read_pointer(folder)).good
    opened = Store(folder).open()
    assert opened.passed_over == ()
    assert earliest <= held(opened) <= latest
    for path in folder.glob("step-*"):
        assert held(Store(folder).open(path)) == entry_of(path).step
    return opened.step


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_operation_the_last_good_checkpoint_opens(
    moment: Moment, tmp_path: Path
) -> None:
    saved(Store(tmp_path), 0)
    step, number, killed = 0, 0, 0
    while True:
        code = in_child(lambda: _resume_and_save(tmp_path, Dying(number, moment), 2))  # noqa: B023
        now = _check(tmp_path, step, step + 2)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed, number, step = killed + 1, number + 1, now
    assert killed > 50
    saved(Store(tmp_path, keep=1), step + 3)
    assert names(tmp_path) == ["last-good", f"step-{step + 3}"]


def test_killed_again_while_the_litter_is_cleared_loses_nothing(tmp_path: Path) -> None:
    saved(Store(tmp_path), 0)
    for number in range(30):
        in_child(lambda: _resume_and_save(tmp_path, Dying(20, "after"), 1))
        code = in_child(lambda: _resume_and_save(tmp_path, Dying(number, "before"), 1))  # noqa: B023
        assert code == -signal.SIGKILL
        _check(tmp_path, 0, 60)


def test_killed_during_the_very_first_save_leaves_an_empty_store_that_can_be_used(
    tmp_path: Path,
) -> None:
    number = 0
    while True:
        folder = tmp_path / f"{number}"
        code = in_child(lambda: saved(Store(folder, disk=Dying(number, "middle")), 5))  # noqa: B023
        entries = Store(folder).list()
        assert [entry.step for entry in entries] in ([], [5])
        if entries:
            assert held(Store(folder).open()) == 5
        saved(Store(folder, keep=1), 6)
        assert names(folder) == ["last-good", "step-6"]
        if code == 0:
            return
        number += 1


def test_killed_while_saving_a_doubtful_state_keeps_the_good_one(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    for number in range(40):
        step = 2 + number
        in_child(partial(_save_doubtful, tmp_path, Dying(number, "after"), step))
        assert held(Store(tmp_path).open()) == 1
