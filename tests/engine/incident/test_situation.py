"""The fault decides the remedy: what a bad step is told to the policy as."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.parts import incident_of, origin_of, step_of
from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.incident.anomaly_check import AnomalyCheck
from stepguard.engine.incident.situation import Decider
from stepguard.engine.recover.rewind import PastAttempts
from stepguard.judge.decide import Situation
from stepguard.ranks.one_decision import OneDecision
from stepguard.records import Evidence, Incident, Origin, Reading, Verdict

DATA = batches(4)


@pytest.fixture
def guard() -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=quiet()) as made:
        yield made


def _situation(
    guard: Guard,
    *,
    kind: Any = "nonfinite_loss",
    origin: Origin | None = None,
    committed: bool = False,
    batch: Any = None,
    **reading: Any,
) -> Situation:
    context, rewinder = guard._context, guard._rewinder
    anomalies = AnomalyCheck(context, rewinder, clips_itself=True)
    ranks = OneDecision(context.agreement, [])
    decider = Decider(context, rewinder, anomalies, ranks, lambda *_: origin_of(), reruns=True)
    found = incident_of(reading=Reading(step=0, **reading), origin=origin)
    incident = Incident(
        id=found.id,
        step=found.step,
        verdict=Verdict(kind=kind, severity="incident"),
        reading=found.reading,
        origin=origin,
    )
    return decider._answer(incident, step_of(batch or DATA[0]), committed).situation


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"loss": math.nan}, "data"),
        ({"kind": "spike"}, "anomaly"),
        ({"kind": "lr_mismatch"}, "update"),
        ({"bad_state": ("param:w",)}, "state"),
        ({"bad_state": ("param:w",), "state_born": True}, "update"),
        ({"bad_state": ("buffer:b",), "state_born": True}, "data"),
        ({"committed": True}, "state"),
    ],
)
def test_fault_is_told_by_what_is_bad(guard: Guard, fields: dict[str, Any], fault: str) -> None:
    assert _situation(guard, **fields).fault == fault


def test_ruined_weights_with_nothing_to_go_back_to_are_answered_as_bad_data(guard: Guard) -> None:
    ruined = origin_of(phase="optimizer", evidence=Evidence(weights_ruined=True))
    assert _situation(guard, origin=ruined).fault == "data"
    assert guard._rewinder.snapshots.take() is not None
    guard._rewinder.probation.commit(guard._context.config.snapshots.probation)
    assert _situation(guard, origin=ruined).fault == "state"


def test_bad_state_counts_as_the_start_only_before_the_first_commit(guard: Guard) -> None:
    assert _situation(guard, bad_state=("param:w",)).at_start
    assert not _situation(guard, bad_state=("param:w",), committed=True).at_start
    guard.step(lambda b: guard._context.model(b[0]).sum(), DATA[0])
    assert not _situation(guard, bad_state=("param:w",)).at_start


def test_guilty_sample_can_be_left_out_at_its_share(guard: Guard) -> None:
    situation = _situation(guard, origin=origin_of(samples=(2,)))
    assert (situation.leave_out, situation.lost_share) == ("sample 2", 0.25)
    whole = _situation(guard)
    assert (whole.leave_out, whole.lost_share) == ("", 1.0)


def test_step_that_did_not_fail_again_is_retried_once(guard: Guard) -> None:
    by_chance = origin_of(reproduced=False)
    assert _situation(guard, origin=by_chance).can_retry
    guard._rewinder.retried = 0
    assert not _situation(guard, origin=by_chance).can_retry
    assert not _situation(guard, origin=origin_of(reproduced=True)).can_retry


def test_step_that_an_earlier_attempt_lost_is_known(guard: Guard) -> None:
    assert not _situation(guard).known
    guard._rewinder.past = PastAttempts(lost_steps=frozenset({0}))
    assert _situation(guard).known
