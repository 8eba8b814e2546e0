"""When a snapshot is taken, and what becomes of one that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepguard
from engine.recover.test_rewind import (
    DATA,
    Harm,
    config,
    decisions,
    learnable,
    nan_moment,
    nan_weight,
    run,
    scene,
)
from scenes import (
    bare,
    difference,
    grouped,
    poisoned,
    quiet,
    state_of,
)
from stepguard import Guard, Policy, TrainingHalted
from stepguard.journal import read_run

# --- what is taken, and when
# ------------------------------------------------------------------------------------------


def test_policy_that_never_rewinds_takes_no_snapshot() -> None:
    guard, _ = run(
        scene(), grouped(DATA[:12], 1), settings=config(policy=Policy(actions=("skip", "stop")))
    )
    assert guard._rewinder.snapshots.ring.snapshots == []


def test_short_run_with_the_default_settings_can_rewind() -> None:
    at, data = scene("sgd"), learnable(60)
    guard, _ = run(at, grouped(data, 1), {45: nan_weight}, quiet())
    assert [d[0] for d in decisions(guard)] == ["rewind"]


@pytest.mark.parametrize("harm", [nan_weight, nan_moment])
def test_damage_in_the_first_steps_is_repaired_from_a_snapshot_on_probation(harm: Harm) -> None:
    damaged, reference = scene(), scene()
    torch.manual_seed(5)
    bare(reference, grouped(DATA[:12], 1))
    torch.manual_seed(5)
    guard, _ = run(damaged, grouped(DATA[:12], 1), {3: harm}, quiet())
    assert decisions(guard) == [("rewind", 1, "repeat")]
    assert difference(state_of(damaged), state_of(reference)) == ""
    assert [(s.step, s.standing) for s in guard._rewinder.snapshots.ring.snapshots] == [
        (1, "young"),
        (8, "young"),
    ]


def test_damage_that_comes_back_is_not_repaired_from_the_same_snapshot_for_ever() -> None:
    with pytest.raises(TrainingHalted, match="every rewind has been tried at step 1"):
        run(scene(), grouped(DATA[:12], 1), dict.fromkeys(range(3, 12), nan_weight), quiet())


def test_state_that_does_not_fit_turns_snapshots_off_and_says_so_once(tmp_path: Path) -> None:
    settings = config(snapshot_memory=10, run_dir=tmp_path)
    guard, _ = run(scene(), grouped(DATA[:20], 1), settings=settings)
    assert guard.armed
    notes = [
        note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "snapshots"
    ]
    assert len(notes) == 1 and "copies of it do not fit" in notes[0]


def test_object_that_cannot_be_kept_turns_snapshots_off_and_not_the_guard(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise RuntimeError("not now")

        def load_state_dict(self, state: Any) -> None: ...

    at = scene()
    with Guard(
        at.model, at.optimizer, state={"odd": Broken()}, config=config(run_dir=tmp_path)
    ) as guard:
        for batch in DATA[:10]:
            assert guard.step(at.loss_fn, batch).committed
        assert guard.armed
    assert any(
        "no snapshots: not now" in str(note.get("summary")) for note in read_run(tmp_path).notes
    )


def test_object_without_a_state_is_refused_with_its_name() -> None:
    at = scene()
    with pytest.raises(stepguard.ConfigError, match=r"state\['ema'\] is a int"):
        Guard(at.model, at.optimizer, state={"ema": 3})


def test_incident_begins_the_probation_anew() -> None:
    at = scene()
    steps = [*grouped(DATA[:6], 1), (poisoned(DATA[6]),), *grouped(DATA[7:12], 1)]
    guard, _ = run(at, steps)
    assert [s.standing for s in guard._rewinder.snapshots.ring.snapshots] == ["young", "young"]


def test_snapshot_under_a_loss_that_rises_a_little_is_still_good() -> None:
    at = scene("sgd")
    at.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0]), b[1]) + b[2]
    data = [(*batch, torch.tensor(0.0 if i < 33 else 0.8)) for i, batch in enumerate(learnable(44))]
    guard, _ = run(at, grouped(data, 1), settings=config(snapshot_every=32, probation=10))
    assert not guard.incidents
    (snapshot,) = guard._rewinder.snapshots.ring.snapshots
    assert (snapshot.step, snapshot.standing) == (32, "good")
