"""The fault decides the remedy, the same on every rank; what may be lost is bounded."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepguard.judge.decide import (
    LEAST_LOST,
    LOST_WINDOW,
    MOST_HEALS,
    Budget,
    Fault,
    RewindPlan,
    RewindTarget,
    Situation,
    allows_continuing,
    budget_from,
    decide,
    next_rewind,
)
from stepguard.records import Action, Decision, Policy

ACTIONS: tuple[Action, ...] = get_args(Action)
FAULTS: tuple[Fault, ...] = get_args(Fault)
BACK = RewindPlan(target=RewindTarget(step=640), data="repeat")
STATE: dict[str, Any] = {"fault": "state", "rewind": BACK}
ANOMALY: dict[str, Any] = {"fault": "anomaly", "rewind": BACK}
policies = st.builds(
    Policy,
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=5).map(tuple),
    max_consecutive=st.none() | st.integers(0, 4),
    max_total=st.none() | st.integers(0, 10),
    max_rewinds=st.integers(0, 3),
)
situations = st.builds(
    Situation,
    step=st.just(0),
    fault=st.sampled_from(FAULTS),
    at_start=st.booleans(),
    rewind=st.none() | st.just(BACK),
    may_act=st.booleans(),
    can_retry=st.booleans(),
    leave_out=st.sampled_from(["", "sample 3"]),
    known=st.booleans(),
    new_scale=st.none() | st.just(8.0),
)


def _play(policy: Policy, count: int, **facts: object) -> list[Decision]:
    """So many incidents in a row."""
    decisions, budget = [], Budget()
    for step in range(count):
        decision, budget = decide(Situation(step=step, **facts), policy, budget)  # type: ignore[arg-type]
        decisions.append(decision)
    return decisions


def only(*actions: Action) -> Policy:
    return Policy(actions=actions)


@pytest.mark.parametrize(
    ("policy", "facts", "actions"),
    [
        # a bad step on good weights is never rewound
        (Policy(), {"rewind": BACK}, ["skip"] * (LEAST_LOST - 1)),
        (only("rewind", "stop"), {"rewind": BACK}, ["rewind"]),
        (only("rewind", "stop"), {}, ["stop"]),
        # what is proven guilty is left out, by its share of the step
        (Policy(), {"leave_out": "sample 5", "lost_share": 0.1}, ["leave_out"] * 500),
        (only("skip"), {"leave_out": "sample 5"}, ["skip"]),
        # what an earlier attempt lost is not counted again
        (Policy(), {"known": True}, ["skip"] * 500),
        # damaged state is rewound, or the run stops
        (Policy(), STATE, ["rewind"]),
        (Policy(), {"fault": "state"}, ["stop"]),
        (Policy(), {"fault": "state", "can_retry": True}, ["stop"]),
        # a damaged rank is healed before anything is rewound, and not for ever
        (Policy(), {"fault": "state", "no_heal": ""}, ["heal"] * MOST_HEALS + ["stop"]),
        (only("skip", "stop"), {"fault": "state", "no_heal": ""}, ["stop"]),
        (Policy(), {"fault": "data", "no_heal": ""}, ["skip"]),
        # what the optimizer made is undone
        (Policy(), {"fault": "update", "rewind": BACK}, ["undo"]),
        # a finite run is never halted
        (Policy(), {"fault": "anomaly"}, ["note"] * 200),
        (Policy(), ANOMALY, ["note"]),
        (Policy(), {**ANOMALY, "may_act": True}, ["rewind"] * 3 + ["note"] * 2),
        (only("stop"), {"fault": "anomaly"}, ["note"]),
        # a step that failed by chance is run again first
        (Policy(), {"can_retry": True}, ["retry"]),
        (only("skip", "stop"), {"can_retry": True}, ["skip"]),
        # state that was bad before the first step
        (Policy(), {"at_start": True}, ["stop"]),
        (only("skip", "stop", "note"), {"at_start": True}, ["note"]),
    ],
)
def test_fault_decides_the_action(
    policy: Policy, facts: dict[str, Any], actions: list[Action]
) -> None:
    assert [decision.action for decision in _play(policy, len(actions), **facts)] == actions


def test_decision_says_what_is_done_why_and_how_often() -> None:
    (decision,) = _play(Policy(), 1, leave_out="sample 5")
    assert decision.left_out == "sample 5"
    assert _play(only("skip"), 1, leave_out="sample 5")[0].left_out == "the step"
    (decision,) = _play(Policy(), 1, **STATE)
    assert (decision.rewound_to, decision.data) == (640, "repeat")
    (decision,) = _play(Policy(), 1, fault="state")
    assert "the state itself is damaged; no rewind: no good snapshot" in decision.reason
    (decision,) = _play(Policy(), 1, fault="state", no_rewind="all tried at step 64")
    assert "all tried at step 64" in decision.reason
    assert _play(Policy(), 1, new_scale=512.0)[0].new_scale == 512.0
    assert [(d.consecutive, d.total) for d in _play(Policy(), 3)] == [(1, 1), (2, 2), (3, 3)]


def test_share_of_lost_samples_stops_the_run() -> None:
    decisions = _play(Policy(), LEAST_LOST, rewind=BACK)
    assert decisions[-1].action == "stop"
    assert (
        "100% of the samples of the last 32 steps were dropped, 50% are allowed"
        in decisions[-1].reason
    )


def test_good_steps_make_room_for_bad_ones() -> None:
    policy, budget = Policy(), Budget()
    for step in range(1000):
        budget = budget.committed().committed()
        decision, budget = decide(Situation(step=step), policy, budget)
        assert decision.action == "skip"
    assert len(budget.lost) <= LOST_WINDOW


def test_rewind_forgives_the_row_but_keeps_the_total() -> None:
    spent = Budget(consecutive=3, total=5, seen=9, lost=((8, 1.0),))
    _, budget = decide(Situation(step=9, **STATE), Policy(), spent)
    assert (budget.consecutive, budget.total, budget.rewinds, budget.lost) == (0, 6, 1, ((8, 1.0),))


def test_limits_the_user_sets_end_the_run() -> None:
    for policy, most, said in (
        (Policy(max_total=7), 7, "8 incidents in this run, 7 are allowed"),
        (Policy(max_consecutive=2), 2, "3 incidents in a row, 2 are allowed"),
        (Policy(max_consecutive=0), 0, "1 incident in a row, 0 are allowed"),
    ):
        decisions = _play(policy, most + 1)
        assert [d.action for d in decisions] == ["skip"] * most + ["stop"]
        assert said in decisions[-1].reason


def test_committed_step_forgives_the_row_but_not_the_total() -> None:
    budget = Budget().spend().spend().committed()
    assert (budget.consecutive, budget.total) == (0, 2)


def test_budget_survives_a_checkpoint() -> None:
    budget = Budget(consecutive=1, total=2, rewinds=1, seen=7, lost=((5, 0.5), (7, 1.0)))
    facts = {"consecutive": 1, "recent": [3, 4], "total": 2, "rewinds": 1, "seen": 7}
    assert budget_from({**facts, "lost": [[5, 0.5], [7, 1.0]]}) == budget
    assert budget_from({"consecutive": 1, "recent": [], "total": 1, "rewinds": 0}).lost == ()


@given(policies, situations)
def test_decision_is_allowed_and_the_same_on_every_rank(
    policy: Policy, situation: Situation
) -> None:
    budget = Budget(consecutive=1, total=2)
    decision, after = decide(situation, policy, budget)
    assert (decision, after) == decide(situation, policy, budget)
    assert decision.action in {*policy.actions, "stop", "note", "undo"}
    assert after.total == budget.total + 1
    if situation.fault == "state" and not situation.at_start:
        assert decision.action in ("rewind", "stop")
    if decision.action == "rewind":
        only_rewinds = not {"leave_out", "skip", "note"} & set(policy.actions)
        assert situation.fault in ("state", "anomaly") or only_rewinds


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_alone_in_a_policy_is_decided_on(action: Action) -> None:
    for fault in FAULTS:
        (decision,) = _play(only(action), 1, fault=fault, rewind=BACK, leave_out="x")
        assert decision.action in {action, "stop", "note", "undo"}
    assert allows_continuing(only(action)) == (action in ("leave_out", "skip", "note"))


# --- which state to go back to


@pytest.mark.parametrize(
    ("repeatable", "plans"),
    [
        (False, [(48, "skip"), (32, "skip"), (16, "skip")]),
        (True, [(48, "repeat"), (48, "skip"), (32, "skip"), (16, "skip")]),
    ],
)
def test_each_further_rewind_for_the_same_fault_goes_further_back_and_then_there_is_none(
    repeatable: bool, plans: list[tuple[int, str]]
) -> None:
    targets = [RewindTarget(step=step) for step in (48, 32, 16)]
    tried: list[RewindPlan] = []
    for _ in plans:
        plan = next_rewind(targets, tried, repeatable=repeatable)
        assert plan is not None
        tried.append(plan)
    assert [(plan.target.step, plan.data) for plan in tried] == plans
    assert next_rewind(targets, tried, repeatable=repeatable) is None
    assert next_rewind([], [], repeatable=repeatable) is None


def test_state_of_the_same_step_on_a_later_timeline_is_another_target() -> None:
    tried = [RewindPlan(target=RewindTarget(step=48), data="skip")]
    again = next_rewind([RewindTarget(step=48, timeline=1)], tried, repeatable=False)
    assert again is not None and again.target.timeline == 1
