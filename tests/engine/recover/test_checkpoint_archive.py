"""The archive writes completed states and gives back those of this run only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.checkpoints import Store
from stepguard.engine.recover.restore import Archive
from stepguard.state.run_state import SavedState

DATA = batches(4)


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=quiet(run_dir=tmp_path)) as made:
        yield made


def _archive(guard: Guard) -> Archive:
    archive = guard._saving._archive
    assert archive is not None
    return archive


def _state(guard: Guard) -> SavedState:
    state = guard._rewinder.snapshots.present()
    _archive(guard).complete(state, [])
    return state


def test_state_that_was_saved_is_read_back_by_its_step(guard: Guard) -> None:
    guard._context.step = 3
    path = _archive(guard).write(3, _state(guard), [{}])
    assert isinstance(path, Path) and path.name == "step-3"
    assert _archive(guard).steps() == [3]
    read = _archive(guard).read(3)
    weight = next(iter(guard._context.model.parameters()))
    assert read is not None and torch.equal(read.tensors["model/0.weight"], weight)
    assert _archive(guard).read(4) is None


def test_checkpoints_of_another_run_and_of_later_steps_are_not_rewound_to(guard: Guard) -> None:
    guard._context.step = 3
    _archive(guard).write(3, _state(guard), [{}])
    guard._context.step = 2
    assert _archive(guard).steps() == []
    guard._context.step = 3
    guard._context.run.id = "another"
    assert _archive(guard).steps() == [] and _archive(guard).own_good() == []


def test_state_that_is_not_called_good_is_kept_but_not_rewound_to(guard: Guard) -> None:
    guard._context.step = 3
    assert _archive(guard).write(3, _state(guard), [{}], "the run has diverged", later=True)
    _archive(guard).background.wait()
    assert [entry.step for entry in _archive(guard).store.list()] == [3]
    assert _archive(guard).steps() == []


def test_tensors_that_are_nonfinite_on_purpose_are_named_in_the_checkpoint(guard: Guard) -> None:
    with torch.no_grad():
        next(iter(guard._context.model.parameters()))[0, 0] = math.inf
    guard._context.meant.names.add("param:0.weight")
    assert _state(guard).facts["nonfinite_ok"] == ["model/0.weight"]


def test_disk_that_refuses_is_told_and_costs_the_checkpoint_only(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Store, "save", refuse)
    assert _archive(guard).write(3, _state(guard), [{}]) is None
    assert "NOT saved" in (tmp_path / "journal.jsonl").read_text()


def test_parts_of_all_ranks_go_into_one_state(guard: Guard) -> None:
    state = SavedState({}, {})
    parts = [
        {"facts": {"rng": {"rank": rank}}, "tensors": {f"rng/{rank}/x": DATA[0][0]}}
        for rank in (0, 1)
    ]
    _archive(guard).complete(state, parts)
    assert sorted(state.tensors) == ["rng/0/x", "rng/1/x"]
    assert state.facts["rng"] == {"0": {"rank": 0}, "1": {"rank": 1}}
    assert "loader" not in state.facts
