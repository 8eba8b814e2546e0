"""A decision says what was really done about a bad step."""

from __future__ import annotations

from typing import get_args

import pytest

from engine.parts import incident_of
from stepguard.engine.incident.run_facts import (
    leaves_out,
    let_through,
    not_applied,
    rewinds,
    skipped_after_all,
    without_micro_batches,
)
from stepguard.records import Action, Decision, Incident, Verdict

ACTIONS: tuple[Action, ...] = get_args(Action)
INSTEAD = {"retry": "skip", "undo": "skip", "rewind": "stop", "heal": "stop"}


def _decided(action: Action) -> Incident:
    return incident_of(decision=Decision(action=action, reason="why", left_out="sample 2"))


def _action(incident: Incident | None) -> str:
    assert incident is not None and incident.decision is not None
    return incident.decision.action


@pytest.mark.parametrize("action", ACTIONS)
def test_action_that_failed_is_replaced_by_the_safest_one(action: Action) -> None:
    after = not_applied(_decided(action))
    assert after.decision is not None
    assert after.decision.action == INSTEAD.get(action, action)
    assert after.decision.reason == (
        f"{action} failed by a fault of stepguard's own" if action in INSTEAD else "why"
    )


def test_incident_without_a_decision_stays_as_it_is() -> None:
    bare = incident_of()
    assert not_applied(bare) is bare
    assert not rewinds(bare) and not leaves_out(bare) and not rewinds(None)


@pytest.mark.parametrize("action", ACTIONS)
def test_only_a_finite_anomaly_that_is_only_told_is_let_through(action: Action) -> None:
    spike = Verdict(kind="spike", severity="incident")
    bad = Verdict(kind="nonfinite_loss", severity="incident")
    assert let_through(spike, _decided(action)) == (action == "note")
    assert not let_through(bad, _decided(action))
    assert let_through(spike, None)


def test_what_was_really_left_out_is_said() -> None:
    incident = without_micro_batches(_decided("leave_out"), [0], 2)
    assert incident.decision is not None
    assert incident.decision.left_out == "micro-batch 1 of 2"


def test_step_that_could_not_be_cut_counts_as_skipped() -> None:
    after = skipped_after_all(_decided("leave_out"))
    assert _action(after) == "skip"
    assert _action(skipped_after_all(_decided("rewind"))) == "rewind"
