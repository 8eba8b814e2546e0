"""The fault decides the remedy, the same on every rank; what may be lost is bounded."""

from __future__ import annotations

from typing import get_args

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
)
from stepguard.records import Action, Decision, Policy

ACTIONS: tuple[Action, ...] = get_args(Action)
FAULTS: tuple[Fault, ...] = get_args(Fault)
BACK = RewindPlan(target=RewindTarget(step=0), data="skip")
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


def test_bad_step_on_good_weights_is_never_rewound() -> None:
    actions = {decision.action for decision in _play(Policy(), LEAST_LOST - 1, rewind=BACK)}
    assert actions == {"skip"}


def test_what_is_proven_guilty_is_left_out() -> None:
    (decision,) = _play(Policy(), 1, leave_out="sample 5")
    assert (decision.action, decision.left_out) == ("leave_out", "sample 5")
    (decision,) = _play(Policy(actions=("skip",)), 1, leave_out="sample 5")
    assert (decision.action, decision.left_out) == ("skip", "the step")


def test_share_of_lost_samples_stops_the_run() -> None:
    decisions = _play(Policy(), LEAST_LOST, rewind=BACK)
    assert decisions[-1].action == "stop"
    assert (
        "100% of the samples of the last 32 steps were dropped, 50% are allowed"
        in decisions[-1].reason
    )


def test_lost_samples_count_by_their_share_of_the_step() -> None:
    actions = {d.action for d in _play(Policy(), 500, leave_out="sample 0", lost_share=0.1)}
    assert actions == {"leave_out"}


def test_good_steps_make_room_for_bad_ones() -> None:
    policy, budget = Policy(), Budget()
    for step in range(1000):
        budget = budget.committed().committed()
        decision, budget = decide(Situation(step=step), policy, budget)
        assert decision.action == "skip"
    assert len(budget.lost) <= LOST_WINDOW


def test_step_that_an_earlier_attempt_lost_is_not_counted_again() -> None:
    assert {d.action for d in _play(Policy(), 500, known=True)} == {"skip"}


def test_damaged_state_is_rewound_or_the_run_stops() -> None:
    assert _play(Policy(), 1, fault="state", rewind=BACK)[0].action == "rewind"
    (decision,) = _play(Policy(), 1, fault="state")
    assert decision.action == "stop"
    assert "the state itself is damaged; no rewind: no good snapshot" in decision.reason


def test_rewind_says_where_it_goes_and_what_becomes_of_the_data() -> None:
    back = RewindPlan(target=RewindTarget(step=640), data="repeat")
    (decision,) = _play(Policy(), 1, fault="state", rewind=back)
    assert (decision.rewound_to, decision.data) == (640, "repeat")


def test_what_the_optimizer_made_is_undone() -> None:
    assert _play(Policy(), 1, fault="update", rewind=BACK)[0].action == "undo"


def test_finite_run_is_never_halted() -> None:
    assert {d.action for d in _play(Policy(), 200, fault="anomaly")} == {"note"}
    acting = _play(Policy(), 5, fault="anomaly", rewind=BACK, may_act=True)
    assert [d.action for d in acting] == ["rewind"] * 3 + ["note"] * 2
    assert _play(Policy(), 1, fault="anomaly", rewind=BACK)[0].action == "note"
    assert _play(Policy(actions=("stop",)), 1, fault="anomaly")[0].action == "note"


def test_policy_that_only_allows_rewinds_gets_them() -> None:
    assert _play(Policy(actions=("rewind", "stop")), 1, rewind=BACK)[0].action == "rewind"
    assert _play(Policy(actions=("rewind", "stop")), 1)[0].action == "stop"


def test_step_that_failed_by_chance_is_run_again_first() -> None:
    assert _play(Policy(), 1, can_retry=True)[0].action == "retry"
    assert _play(Policy(actions=("skip", "stop")), 1, can_retry=True)[0].action == "skip"
    assert _play(Policy(), 1, can_retry=True, fault="state")[0].action == "stop"


def test_reason_for_no_rewind_is_passed_on() -> None:
    (decision,) = _play(
        Policy(), 1, fault="state", no_rewind="every rewind has been tried at step 64"
    )
    assert decision.action == "stop" and "tried at step 64" in decision.reason


def test_state_that_was_bad_before_the_first_step_stops_the_run_unless_told_otherwise() -> None:
    assert _play(Policy(), 1, at_start=True)[0].action == "stop"
    assert _play(Policy(actions=("skip", "stop", "note")), 1, at_start=True)[0].action == "note"


def test_decision_counts_the_incident_it_answers() -> None:
    decisions = _play(Policy(), 3)
    assert [(d.consecutive, d.total) for d in decisions] == [(1, 1), (2, 2), (3, 3)]


def test_scale_that_is_known_to_work_is_passed_on() -> None:
    assert _play(Policy(), 1, new_scale=512.0)[0].new_scale == 512.0


def test_rewind_forgives_the_row_but_keeps_the_total() -> None:
    spent = Budget(consecutive=3, total=5, seen=9, lost=((8, 1.0),))
    _, budget = decide(Situation(step=9, fault="state", rewind=BACK), Policy(), spent)
    assert (budget.consecutive, budget.total, budget.rewinds, budget.lost) == (0, 6, 1, ((8, 1.0),))


def test_limits_the_user_sets_end_the_run() -> None:
    policy = Policy(max_total=7)
    assert [d.action for d in _play(policy, 8)] == ["skip"] * 7 + ["stop"]
    assert [d.action for d in _play(Policy(max_consecutive=2), 3)] == ["skip"] * 2 + ["stop"]


def test_budget_survives_a_checkpoint() -> None:
    budget = Budget(consecutive=1, total=2, rewinds=1, seen=7, lost=((5, 0.5), (7, 1.0)))
    facts = {
        "consecutive": 1,
        "recent": [3, 4],
        "total": 2,
        "rewinds": 1,
        "seen": 7,
        "lost": [[5, 0.5], [7, 1.0]],
    }
    assert budget_from(facts) == budget
    assert budget_from({"consecutive": 1, "recent": [], "total": 1, "rewinds": 0}).lost == ()


@pytest.mark.slow
@given(policies, situations)
def test_decision_is_one_of_the_policy_and_the_same_on_every_rank(
    policy: Policy, situation: Situation
) -> None:
    budget = Budget(consecutive=1, total=2)
    decision, after = decide(situation, policy, budget)
    assert (decision, after) == decide(situation, policy, budget)
    assert decision.action in {*policy.actions, "stop", "note", "undo"}
    assert after.total == budget.total + 1


@given(policies, situations)
def test_damaged_state_is_never_trained_on_silently(policy: Policy, situation: Situation) -> None:
    decision, _ = decide(situation, policy, Budget())
    if situation.fault == "state" and not situation.at_start:
        assert decision.action in ("rewind", "stop")


@given(policies, situations)
def test_only_an_anomaly_or_a_bad_start_is_let_through(
    policy: Policy, situation: Situation
) -> None:
    decision, _ = decide(situation, policy, Budget())
    if decision.action == "rewind":
        only_rewinds = not {"leave_out", "skip", "note"} & set(policy.actions)
        assert situation.fault in ("state", "anomaly") or only_rewinds


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_alone_in_a_policy_is_decided_on(action: Action) -> None:
    for fault in FAULTS:
        (decision,) = _play(Policy(actions=(action,)), 1, fault=fault, rewind=BACK, leave_out="x")
        assert decision.action in {action, "stop", "note", "undo"}


@pytest.mark.parametrize("action", ACTIONS)
def test_only_actions_that_go_on_without_the_step_make_a_policy_continue(action: Action) -> None:
    continues = action in ("leave_out", "skip", "note")
    assert allows_continuing(Policy(actions=(action,))) == continues


def test_damaged_rank_is_healed_before_anything_is_rewound() -> None:
    situation = Situation(step=3, fault="state", no_heal="")
    decision, budget = decide(situation, Policy(), Budget())
    assert (decision.action, budget.heals, budget.rewinds) == ("heal", 1, 0)


def test_healing_is_bounded_and_up_to_the_policy() -> None:
    situation = Situation(step=3, fault="state", no_heal="")
    assert decide(situation, Policy(), Budget(heals=MOST_HEALS))[0].action == "stop"
    assert decide(situation, Policy(actions=("skip", "stop")), Budget())[0].action == "stop"
    assert (
        decide(Situation(step=3, fault="data", no_heal=""), Policy(), Budget())[0].action == "skip"
    )
