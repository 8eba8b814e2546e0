"""Budgets are finite and only grow; a committed step forgives what is counted in a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepguard.judge.decide import Budget
from stepguard.records import Policy
from stepguard.report.phrases import count


def _spend(count: int) -> Budget:
    budget = Budget()
    for _ in range(count):
        budget = budget.spend()
    return budget


def test_new_budget_breaks_no_limit() -> None:
    assert Budget().exceeded(Policy(max_consecutive=0, max_total=0)) == ""


def test_spending_leaves_the_old_budget_alone() -> None:
    before = Budget()
    before.spend()
    assert before == Budget()


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_incidents_in_a_row_are_limited(limit: int) -> None:
    policy = Policy(max_consecutive=limit)
    assert _spend(limit).exceeded(policy) == ""
    assert (
        _spend(limit + 1).exceeded(policy)
        == f"{count(limit + 1, 'incident')} in a row, {limit} are allowed"
    )


def test_committed_step_forgives_the_row_but_not_the_total() -> None:
    budget = _spend(3).committed()
    assert (budget.consecutive, budget.total) == (0, 3)


def test_incidents_of_the_whole_run_are_limited() -> None:
    policy = Policy(max_total=3, max_consecutive=100)
    assert _spend(3).exceeded(policy) == ""
    assert _spend(4).exceeded(policy) == "4 incidents in this run, 3 are allowed"


@pytest.mark.slow
@given(st.lists(st.booleans(), max_size=60))
def test_counts_are_what_a_plain_recount_gives(events: list[bool]) -> None:
    budget, row = Budget(), 0
    for commits in events:
        budget = budget.spend()
        row += 1
        if commits:
            budget, row = budget.committed(), 0
    assert budget.total == len(events)
    assert budget.consecutive == row
