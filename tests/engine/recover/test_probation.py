"""A snapshot is good after its probation, bad where an incident found the weights hurt."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.incident.closer_look import accept, stored_trouble
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
    probation.rewound(snapshot)
    assert _standing(snapshot) == "young" and probation.hurt_at is None


def test_snapshot_with_a_nonfinite_tensor_is_not_sound(guard: Guard) -> None:
    with torch.no_grad():
        next(iter(guard._context.model.parameters()))[0, 0] = math.nan
    assert not guard._rewinder.probation.sound(_taken(guard))


def test_tensor_that_is_accepted_as_nonfinite_does_not_count(guard: Guard) -> None:
    with torch.no_grad():
        next(iter(guard._context.model.parameters()))[0, 0] = math.nan
    guard._context.meant.names.add("param:0.weight")
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


def test_high_loss_is_a_divergence_only_where_the_weights_confirm_it(guard: Guard) -> None:
    history = guard._context.history
    probation = guard._rewinder.probation
    guard.step(lambda batch: guard._context.model(batch[0]).square().mean(), DATA[0])
    history.first[:] = [2.0]
    history.best = 2.0
    history.losses.extend([1e6] * 9)
    history.diverged_at = 1
    assert not probation.divergence()
    with torch.no_grad():
        for parameter in guard._context.model.parameters():
            parameter.mul_(50.0)
    assert "grown to" in probation.divergence()
    history.diverged_at = None
    history.losses.extend([1.0] * 9)
    history.best = 1.0
    assert not probation.divergence()


def test_exploded_weights_are_a_divergence_where_the_loss_shows_nothing(guard: Guard) -> None:
    model = guard._context.model
    guard.step(lambda batch: 0.0 * model(batch[0]).sum() + 1.0, DATA[0])
    assert not guard._rewinder.probation.divergence()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e17)
    assert "grown to" in guard._rewinder.probation.divergence()
    snapshot = _taken(guard)
    guard._rewinder.probation.commit(11)
    assert _standing(snapshot) == "bad"


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _Capped(nn.Module):
    """A sentinel buffer whose name is the end of a parameter's name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), math.inf))
        self.sub = _Scaled()
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.sub(torch.minimum(x, self.get_buffer("scale"))))
        return found


def test_sentinel_buffer_does_not_excuse_a_parameter_whose_name_ends_alike() -> None:
    model = _Capped()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = quiet(snapshot_every=1, probation=2)
    with Guard(model, optimizer, state={"average": average}, config=settings) as guard:
        for step in range(12):
            if step == 8:
                with torch.no_grad():
                    model.sub.scale[1] = math.nan
            result = guard.step(lambda b: model(b).square().mean(), torch.randn(4, 3))
            assert bool(model.sub.scale.isfinite().all())
            if result.incident is not None:
                assert result.incident.decision is not None
                assert (step, result.incident.decision.rewound_to) == (8, 6)
        bad = {"model/scale", "model/sub.scale", "extra:average/module.scale"}
        meant = guard._rewinder.probation.meant_nonfinite(bad)
    assert meant == {"model/scale", "extra:average/module.scale"}
    assert len(guard.incidents) == 1


def test_accepted_slot_of_one_parameter_does_not_excuse_that_of_another(guard: Guard) -> None:
    context = guard._context
    first, second = context.parameters[:2]
    context.optimizer.state[first] = {"exp_avg": torch.full_like(first, math.nan)}
    context.optimizer.state[second] = {"exp_avg": torch.zeros_like(second)}
    assert stored_trouble(context) == ["opt:exp_avg"]
    accept(context, ["opt:exp_avg"])
    assert stored_trouble(context) == []
    saved = {"optimizer/0.weight/exp_avg", "optimizer/0.bias/exp_avg"}
    assert guard._rewinder.probation.meant_nonfinite(saved) == {"optimizer/0.weight/exp_avg"}
    context.optimizer.state[second]["exp_avg"].fill_(math.inf)
    assert stored_trouble(context) == ["opt:exp_avg"]
