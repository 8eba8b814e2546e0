"""Budgets are finite and only grow; a committed step forgives what is counted in a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepguard.policy import Budget
from stepguard.policy.decide import PER
from stepguard.records import Policy
from stepguard.report.phrases import count


def _spend(*steps: int) -> Budget:
    budget = Budget()
    for step in steps:
        budget = budget.spend(step)
    return budget


def test_new_budget_breaks_no_limit() -> None:
    assert Budget().exceeded(Policy(max_consecutive=0, max_per_1000=0, max_total=0)) == ""


def test_spending_leaves_the_old_budget_alone() -> None:
    before = Budget()
    before.spend(3)
    assert before == Budget()


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_incidents_in_a_row_are_limited(limit: int) -> None:
    policy = Policy(max_consecutive=limit)
    assert _spend(*range(limit)).exceeded(policy) == ""
    assert (
        _spend(*range(limit + 1)).exceeded(policy)
        == f"{count(limit + 1, 'incident')} in a row, {limit} are allowed"
    )


def test_committed_step_forgives_the_row_but_not_the_total() -> None:
    budget = _spend(0, 1, 2).committed()
    assert (budget.consecutive, budget.total, len(budget.recent)) == (0, 3, 3)


def test_incidents_within_1000_steps_are_limited() -> None:
    policy = Policy(max_per_1000=2, max_consecutive=100)
    assert _spend(0, 1).exceeded(policy) == ""
    assert (
        _spend(0, 1, PER - 1).exceeded(policy) == f"3 incidents within {PER} steps, 2 are allowed"
    )
    assert _spend(0, 1, PER).exceeded(policy) == ""


def test_incident_leaves_the_window_after_exactly_1000_steps() -> None:
    assert _spend(0, PER - 1).recent == (0, PER - 1)
    assert _spend(0, PER).recent == (PER,)


def test_incidents_of_the_whole_run_are_limited() -> None:
    policy = Policy(max_total=3, max_consecutive=100, max_per_1000=100)
    far_apart = [i * 5000 for i in range(4)]
    assert _spend(*far_apart[:3]).exceeded(policy) == ""
    assert _spend(*far_apart).exceeded(policy) == "4 incidents in this run, 3 are allowed"


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=60))
def test_counts_are_what_a_plain_recount_gives(events: list[tuple[int, bool]]) -> None:
    budget, step, bad, row = Budget(), 0, [], 0
    for gap, commits in events:
        step += gap
        budget = budget.spend(step)
        bad.append(step)
        row += 1
        if commits:
            budget, row = budget.committed(), 0
    assert budget.total == len(bad)
    assert budget.consecutive == row
    assert list(budget.recent) == [s for s in bad if s > bad[-1] - PER]
