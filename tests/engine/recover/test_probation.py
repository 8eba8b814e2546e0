"""A snapshot is good after its probation, bad where an incident found the weights hurt."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from guard.scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.state.snapshot import Snapshot, Standing

DATA = batches(8)


@pytest.fixture
def guard() -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(probation=10, snapshot_every=1000)) as made:
        yield made


def _taken(guard: Guard) -> Snapshot:
    snapshot = guard._rewinder.snapshots.take()
    assert snapshot is not None
    return snapshot


def _standing(snapshot: Snapshot) -> Standing:
    return snapshot.standing


def test_snapshot_is_good_once_its_probation_is_over(guard: Guard) -> None:
    snapshot = _taken(guard)
    guard._rewinder.probation.commit(9)
    assert _standing(snapshot) == "young"
    guard._rewinder.probation.commit(10)
    assert _standing(snapshot) == "good"


def test_incident_restarts_the_probation(guard: Guard) -> None:
    snapshot = _taken(guard)
    guard._rewinder.probation.incident(4, hurt=False)
    guard._rewinder.probation.commit(14)
    assert _standing(snapshot) == "young"
    guard._rewinder.probation.commit(15)
    assert _standing(snapshot) == "good"


def test_incident_that_finds_the_weights_hurt_makes_young_snapshots_bad(guard: Guard) -> None:
    snapshot = _taken(guard)
    probation = guard._rewinder.probation
    probation.incident(4, hurt=True)
    assert _standing(snapshot) == "bad" and probation.hurt_at == 4
    assert not probation.worth_keeping(snapshot)
    probation.rewound(snapshot)
    assert _standing(snapshot) == "young" and probation.hurt_at is None


def test_snapshot_with_a_nonfinite_tensor_is_not_sound(guard: Guard) -> None:
    with torch.no_grad():
        next(iter(guard._context.model.parameters()))[0, 0] = math.nan
    assert not guard._rewinder.probation.sound(_taken(guard))


def test_tensor_that_is_accepted_as_nonfinite_does_not_count(guard: Guard) -> None:
    with torch.no_grad():
        next(iter(guard._context.model.parameters()))[0, 0] = math.nan
    guard._context.accepted.add("param:0.weight")
    assert guard._rewinder.probation.sound(_taken(guard))
    assert guard._rewinder.probation.meant_nonfinite({"model/0.weight", "model/10.weight"}) == {
        "model/0.weight"
    }


def test_distance_of_the_weights_is_measured_from_the_newest_good_snapshot(guard: Guard) -> None:
    probation = guard._rewinder.probation
    assert probation.moved_since_good() is None
    _taken(guard)
    probation.commit(10)
    assert probation.moved_since_good() == 0.0
    with torch.no_grad():
        for parameter in guard._context.model.parameters():
            parameter.mul_(2.0)
    assert probation.moved_since_good() == pytest.approx(1.0)


def test_lost_level_counts_as_ruin_only_where_the_weights_confirm_it(guard: Guard) -> None:
    history = guard._context.history
    history.losses.extend([1.0] * 9)
    history.first.append(2.0)
    history.best = 0.5
    history.ruined_at = 3
    probation = guard._rewinder.probation
    assert not probation.ruined
    history.losses.extend([1e6] * 9)
    assert probation.ruined
    history.ruined_at = None
    assert not probation.ruined
