"""Which state to go back to: newest first, further back for the same trouble, never the same thing
twice.
"""

from __future__ import annotations

from stepguard.policy.rewind_choice import Place, Remedy, choose
from stepguard.records import Policy

PLACES = [Place(step=48), Place(step=32), Place(step=16)]
DEFAULT = Policy()
SLOWER = Policy(rewind_lr="lower", lr_factor=0.5)


def _all(policy: Policy = DEFAULT, *, repeatable: bool = False, most: int = 10) -> list[Remedy]:
    """Every remedy in turn, if none of them helps."""
    tried: list[Remedy] = []
    while len(tried) < most:
        remedy = choose(PLACES, tried, policy, repeatable=repeatable, rewinds=len(tried))
        if remedy is None:
            break
        tried.append(remedy)
    return tried


def test_nothing_good_means_no_remedy() -> None:
    assert choose([], [], Policy(), repeatable=True, rewinds=0) is None


def test_each_further_rewind_for_the_same_trouble_goes_further_back_and_then_there_is_none() -> (
    None
):
    assert [(r.place.step, r.data) for r in _all()] == [(48, "skip"), (32, "skip"), (16, "skip")]


def test_fault_that_may_be_gone_is_repeated_exactly_and_then_stepped_around() -> None:
    found = [(r.place.step, r.data) for r in _all(repeatable=True)]
    assert found == [(48, "repeat"), (48, "skip"), (32, "skip"), (16, "skip")]


def test_data_goes_where_the_policy_says() -> None:
    assert {r.data for r in _all(Policy(rewind_data="reorder"))} == {"reorder"}


def test_lowered_rate_falls_further_with_each_rewind() -> None:
    found = [(r.place.step, r.lr_factor) for r in _all(SLOWER, most=5)]
    assert found == [(48, 0.5), (32, 0.25), (16, 0.125), (48, 0.0625), (48, 0.03125)]


def test_no_remedy_is_ever_tried_twice() -> None:
    for policy in (Policy(), SLOWER, Policy(rewind_data="reorder")):
        found = _all(policy, repeatable=True)
        assert len(found) == len(set(found))


def test_state_of_the_same_step_on_a_later_timeline_is_another_place() -> None:
    tried = [Remedy(place=Place(step=48), data="skip")]
    again = choose([Place(step=48, timeline=1)], tried, Policy(), repeatable=False, rewinds=1)
    assert again is not None and again.place.timeline == 1
