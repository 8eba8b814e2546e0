"""Every action has words for every output."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest

from report.literals import BARE
from stepguard.records import Decision, Policy, Reading
from stepguard.records.incident import Action
from stepguard.report.phrases import ACTION_WORDS, budget, done, done_times, effect

ACTIONS: tuple[Action, ...] = typing.get_args(Action)


def test_no_action_is_without_words() -> None:
    assert set(ACTION_WORDS) == set(ACTIONS)
    for words in ACTION_WORDS.values():
        assert words.done and words.effect and words.log


def test_part_that_was_left_out_is_named() -> None:
    assert done(Decision(action="leave_out", left_out="sample 5")) == "continued without sample 5"
    assert done(Decision(action="leave_out")) == "continued without the bad part"
    assert done_times({"skip": 3, "rewind": 1}) == "skipped 3, rewound 1"


@pytest.mark.parametrize(
    ("decision", "bad_state", "words"),
    [
        (Decision(action="skip"), (), "weights, optimizer state and buffers are as before"),
        (Decision(action="skip", not_restored="m.count moved"), (), "vetoed, but m.count moved"),
        (Decision(action="rewind", rewound_to=40, data="skip"), (), "as it was after 40 steps; "),
        (Decision(action="stop", rewound_to=1), ("param:w",), "those after 1 step, the newest"),
        (Decision(action="stop"), ("param:w",), "damaged (param:w): restore a good checkpoint"),
        (None, (), ""),
    ],
)
def test_effect_says_what_is_in_memory_now(
    decision: Decision | None, bad_state: tuple[str, ...], words: str
) -> None:
    incident = replace(BARE, decision=decision, reading=Reading(step=7, bad_state=bad_state))
    assert words in effect(incident)
    assert bool(effect(incident)) == (decision is not None)


def test_budget_names_its_limits_where_the_policy_has_any() -> None:
    decision = Decision(action="skip", consecutive=2, total=5)
    assert budget(decision) == "2 in a row, 5 in this run"
    limited = Policy(max_consecutive=3, max_total=9)
    assert budget(decision, limited) == "2 of 3 in a row, 5 of 9 in this run"
