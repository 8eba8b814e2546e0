"""Checkpoints that the guard takes by itself."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.recover.test_restore import (
    DATA,
    LOADERS,
    _names,
    _ruin,
    _train,
    config,
    guard_of,
    scene,
)
from scenes import difference, quiet, state_of


def test_checkpoints_are_written_by_themselves_once_they_have_proved_good(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path, checkpoint_every=7, keep=2)) as guard:
        for batch in DATA[:13]:
            guard.step(at.loss_fn, batch)
            assert _names(tmp_path) == []
        guard.step(at.loss_fn, DATA[13])
        guard._saving.wait()
        assert _names(tmp_path) == ["step-7"]
        for batch in DATA[14:30]:
            guard.step(at.loss_fn, batch)
            guard._saving.wait()
    assert _names(tmp_path) == ["step-14", "step-21"]


def test_checkpoint_taken_by_itself_resumes_bit_identically(tmp_path: Path) -> None:
    whole, first, second = scene(), scene(), scene()
    loader = LOADERS["plain"]
    torch.manual_seed(5)
    with guard_of(whole, quiet(), loader()) as guard:
        _train(guard, whole, 1, None, save=False)
    torch.manual_seed(5)
    with guard_of(first, config(tmp_path, checkpoint_every=7), loader()) as guard:
        _train(guard, first, 1, 16, save=False)
    with guard_of(second, config(tmp_path), loader()) as guard:
        assert guard.restore() == 7
        _train(guard, second, 1, None, save=False)
    assert difference(state_of(second), state_of(whole)) == ""


def test_state_from_before_damage_that_can_be_seen_is_written_once_it_has_proved_good(
    tmp_path: Path,
) -> None:
    at = scene()
    with guard_of(at, config(tmp_path, checkpoint_every=10, snapshot_every=2)) as guard:
        for index, batch in enumerate(DATA[:28]):
            if index == 12:
                _ruin(at)
            guard.step(at.loss_fn, batch)
        assert [i.decision.action for i in guard.incidents if i.decision] == ["rewind"]
    assert _names(tmp_path)[0] == "step-10"


def test_run_without_room_for_snapshots_still_writes_checkpoints(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path, checkpoint_every=5, snapshot_memory=1)) as guard:
        for batch in DATA[:11]:
            guard.step(at.loss_fn, batch)
    assert _names(tmp_path) == ["step-5", "step-10"]
    second = scene()
    with guard_of(second, config(tmp_path)) as guard:
        assert guard.restore() == 10


def test_trouble_with_no_snapshot_left_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    at = scene()
    with guard_of(at, config(tmp_path, checkpoint_every=5, snapshot_memory=1)) as guard:
        for index, batch in enumerate(DATA[:14]):
            if index == 12:
                _ruin(at)
            guard.step(at.loss_fn, batch)
        (decision,) = [i.decision for i in guard.incidents]
    assert decision is not None and (decision.action, decision.rewound_to) == ("rewind", 10)
    assert all(torch.isfinite(p).all() for p in at.model.parameters())
