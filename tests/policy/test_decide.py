"""The first action that can still help, the same on every rank, and always an end."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepguard.policy import Budget, decide
from stepguard.policy.decide import BEYOND_REPAIR, Situation
from stepguard.policy.places import Place, Remedy
from stepguard.records import Action, Decision, Policy

ACTIONS: tuple[Action, ...] = get_args(Action)
BACK = Remedy(place=Place(step=0), data="skip")
policies = st.builds(
    Policy,
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=5).map(tuple),
    max_consecutive=st.integers(0, 4),
    max_per_1000=st.integers(0, 6),
    max_total=st.integers(0, 10),
    max_rewinds=st.integers(0, 3),
    lr_factor=st.sampled_from([0.1, 0.5]),
    bad_start=st.sampled_from(["stop", "warn"]),
)
situations = st.builds(
    Situation,
    step=st.just(0),
    hurt=st.booleans(),
    at_start=st.booleans(),
    lost_share=st.none() | st.floats(0, 100),
    remedy=st.none() | st.just(BACK),
    can_retry=st.booleans(),
    new_scale=st.none() | st.just(8.0),
)


def _play(policy: Policy, count: int, **facts: object) -> list[Decision]:
    """So many incidents in a row."""
    decisions, budget = [], Budget()
    for step in range(count):
        decision, budget = decide(Situation(step=step, **facts), policy, budget)  # type: ignore[arg-type]
        decisions.append(decision)
    return decisions


def test_default_policy_skips_three_times_then_rewinds_then_starts_over_and_stops() -> None:
    actions = [decision.action for decision in _play(Policy(), 16, remedy=BACK)]
    assert actions == [*(["skip"] * 3 + ["rewind"]) * 3, *["skip"] * 3, "stop"]


def test_default_policy_stops_when_there_is_nothing_to_go_back_to() -> None:
    decisions = _play(Policy(), 4)
    assert [decision.action for decision in decisions] == ["skip", "skip", "skip", "stop"]
    assert decisions[-1].reason == (
        "no skip: 4 incidents in a row, 3 are allowed; no rewind: no good snapshot or checkpoint to go back to"
    )


def test_damaged_state_is_not_skipped_over() -> None:
    assert _play(Policy(), 1, hurt=True, remedy=BACK)[0].action == "rewind"
    (decision,) = _play(Policy(), 1, hurt=True)
    assert decision.action == "stop"
    assert "no skip: the state itself is damaged" in decision.reason


def test_rewind_says_where_it_goes_and_what_becomes_of_the_data() -> None:
    back = Remedy(place=Place(step=640), data="reorder", lr_factor=0.25)
    (decision,) = _play(Policy(), 1, hurt=True, remedy=back)
    assert (decision.rewound_to, decision.data, decision.lr_factor) == (640, "reorder", 0.25)


def test_step_that_failed_by_chance_is_run_again_first() -> None:
    assert _play(Policy(), 1, can_retry=True)[0].action == "retry"
    assert _play(Policy(actions=("skip", "stop")), 1, can_retry=True)[0].action == "skip"
    assert _play(Policy(), 1, can_retry=True, hurt=True)[0].action == "stop"


def test_reason_for_no_rewind_is_passed_on() -> None:
    (decision,) = _play(Policy(), 1, hurt=True, no_rewind="every remedy has been tried at step 64")
    assert decision.action == "stop" and "tried at step 64" in decision.reason


def test_state_that_was_bad_before_the_first_step_stops_the_run_unless_told_otherwise() -> None:
    assert _play(Policy(), 1, at_start=True)[0].action == "stop"
    assert _play(Policy(bad_start="warn"), 1, at_start=True)[0].action == "warn"


def test_decision_counts_the_incident_it_answers() -> None:
    decisions = _play(Policy(), 3)
    assert [(d.consecutive, d.total) for d in decisions] == [(1, 1), (2, 2), (3, 3)]


def test_lowering_the_rate_says_by_how_much() -> None:
    policy = Policy(actions=("lower_lr",), lr_factor=0.25)
    assert _play(policy, 1)[0].lr_factor == 0.25
    assert _play(Policy(), 1)[0].lr_factor is None


def test_scale_that_is_known_to_work_is_passed_on() -> None:
    assert _play(Policy(), 1, new_scale=512.0)[0].new_scale == 512.0


def test_rewind_forgives_the_row_but_keeps_the_total() -> None:
    _, budget = decide(Situation(step=9, remedy=BACK), Policy(actions=("rewind",)), Budget(consecutive=3, total=5))
    assert (budget.consecutive, budget.total, budget.rewinds) == (0, 6, 1)


def test_hurt_weights_with_no_way_back_may_recover_and_are_warned_about() -> None:
    (decision,) = _play(Policy(), 1, lost_share=1.0)
    assert decision.action == "warn"
    assert "no rewind" in decision.reason


def test_hurt_weights_beyond_repair_stop_the_run() -> None:
    assert _play(Policy(), 1, lost_share=BEYOND_REPAIR)[0].action == "stop"


def test_hurt_weights_are_rewound_where_possible() -> None:
    assert _play(Policy(), 1, lost_share=1.0, remedy=BACK)[0].action == "rewind"


def test_policy_that_only_stops_also_stops_on_hurt_weights() -> None:
    assert _play(Policy(actions=("stop",)), 1, lost_share=1.0)[0].action == "stop"


def test_warnings_about_hurt_weights_have_a_budget_too() -> None:
    budget, actions = Budget(), []
    for step in range(30):
        decision, budget = decide(Situation(step=step, lost_share=1.0), Policy(max_per_1000=20), budget)
        actions.append(decision.action)
        budget = budget.committed()
    assert actions[:21] == ["warn"] * 20 + ["stop"]


@pytest.mark.parametrize("action", ["skip", "warn", "lower_lr"])
def test_every_budget_ends_in_a_stop_even_if_steps_commit_in_between(action: Action) -> None:
    policy = Policy(actions=(action,), max_total=7, max_per_1000=1000)
    budget, count = Budget(), 0
    while True:
        decision, budget = decide(Situation(step=count * 10), policy, budget)
        budget = budget.committed()
        count += 1
        if decision.action == "stop":
            break
        assert count <= 7
    assert count == 8


@given(policies, situations, st.booleans())
def test_incidents_always_come_to_an_end(policy: Policy, situation: Situation, commits: bool) -> None:
    if situation.at_start and policy.bad_start == "warn":
        return  # asked about once only, before the first step
    limit = policy.max_total + policy.max_rewinds + 2
    budget = Budget()
    for _ in range(limit):
        decision, budget = decide(situation, policy, budget)
        if decision.action == "stop":
            return
        if commits:
            budget = budget.committed()
    raise AssertionError(f"no stop within {limit} incidents")


@given(policies, situations)
def test_decision_is_one_of_the_policy_and_the_same_on_every_rank(policy: Policy, situation: Situation) -> None:
    budget = Budget(consecutive=1, total=2, recent=(0, 0))
    decision, after = decide(situation, policy, budget)
    assert (decision, after) == decide(situation, policy, budget)
    assert decision.action in {*policy.actions, "stop", "warn"}
    assert after.total == budget.total + 1


@given(policies, situations)
def test_damaged_state_is_never_trained_on_silently(policy: Policy, situation: Situation) -> None:
    decision, _ = decide(situation, policy, Budget())
    if situation.hurt and not situation.at_start and situation.lost_share is None:
        assert decision.action in ("rewind", "stop", "warn")
