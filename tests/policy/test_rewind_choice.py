"""Which state to go back to: newest first, further back for the same trouble, never the same thing
twice.
"""

from __future__ import annotations

from stepguard.policy.decide import RewindPlan, RewindTarget, next_rewind
from stepguard.records import Policy

TARGETS = [RewindTarget(step=48), RewindTarget(step=32), RewindTarget(step=16)]
DEFAULT = Policy()
SLOWER = Policy(rewind_lr="lower", lr_factor=0.5)


def _all(policy: Policy = DEFAULT, *, repeatable: bool = False, most: int = 10) -> list[RewindPlan]:
    """Every rewind in turn, if none of them helps."""
    tried: list[RewindPlan] = []
    while len(tried) < most:
        plan = next_rewind(TARGETS, tried, policy, repeatable=repeatable, rewinds=len(tried))
        if plan is None:
            break
        tried.append(plan)
    return tried


def test_nothing_good_means_no_rewind() -> None:
    assert next_rewind([], [], Policy(), repeatable=True, rewinds=0) is None


def test_each_further_rewind_for_the_same_fault_goes_further_back_and_then_there_is_none() -> None:
    assert [(r.target.step, r.data) for r in _all()] == [(48, "skip"), (32, "skip"), (16, "skip")]


def test_fault_that_may_be_gone_is_first_repeated_exactly_and_then_skipped_at_the_same_target() -> (
    None
):
    found = [(r.target.step, r.data) for r in _all(repeatable=True)]
    assert found == [(48, "repeat"), (48, "skip"), (32, "skip"), (16, "skip")]


def test_data_goes_where_the_policy_says() -> None:
    assert {r.data for r in _all(Policy(rewind_data="reorder"))} == {"reorder"}


def test_lowered_rate_falls_further_with_each_rewind() -> None:
    found = [(r.target.step, r.lr_factor) for r in _all(SLOWER, most=5)]
    assert found == [(48, 0.5), (32, 0.25), (16, 0.125), (48, 0.0625), (48, 0.03125)]


def test_no_rewind_is_ever_tried_twice() -> None:
    for policy in (Policy(), SLOWER, Policy(rewind_data="reorder")):
        found = _all(policy, repeatable=True)
        assert len(found) == len(set(found))


def test_state_of_the_same_step_on_a_later_timeline_is_another_target() -> None:
    tried = [RewindPlan(target=RewindTarget(step=48), data="skip")]
    again = next_rewind(
        [RewindTarget(step=48, timeline=1)], tried, Policy(), repeatable=False, rewinds=1
    )
    assert again is not None and again.target.timeline == 1
