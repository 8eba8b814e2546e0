"""Which state to go back to: newest first, further back for the same trouble, never the same thing
twice.
"""

from __future__ import annotations

from stepguard.judge.decide import RewindPlan, RewindTarget, next_rewind

TARGETS = [RewindTarget(step=48), RewindTarget(step=32), RewindTarget(step=16)]


def _all(*, repeatable: bool = False, most: int = 10) -> list[RewindPlan]:
    """Every rewind in turn, if none of them helps."""
    tried: list[RewindPlan] = []
    while len(tried) < most:
        plan = next_rewind(TARGETS, tried, repeatable=repeatable)
        if plan is None:
            break
        tried.append(plan)
    return tried


def test_nothing_good_means_no_rewind() -> None:
    assert next_rewind([], [], repeatable=True) is None


def test_each_further_rewind_for_the_same_fault_goes_further_back_and_then_there_is_none() -> None:
    assert [(r.target.step, r.data) for r in _all()] == [(48, "skip"), (32, "skip"), (16, "skip")]


def test_fault_that_may_be_gone_is_first_repeated_exactly_and_then_skipped_at_the_same_target() -> (
    None
):
    found = [(r.target.step, r.data) for r in _all(repeatable=True)]
    assert found == [(48, "repeat"), (48, "skip"), (32, "skip"), (16, "skip")]


def test_no_rewind_is_ever_tried_twice() -> None:
    found = _all(repeatable=True)
    assert len(found) == len(set(found))


def test_state_of_the_same_step_on_a_later_timeline_is_another_target() -> None:
    tried = [RewindPlan(target=RewindTarget(step=48), data="skip")]
    again = next_rewind([RewindTarget(step=48, timeline=1)], tried, repeatable=False)
    assert again is not None and again.target.timeline == 1
