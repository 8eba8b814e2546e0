"""The weights are blamed for a finite anomaly only where independent signs agree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from judge.runs import SETTLED, played, reading
from stepguard.judge.judge import LASTING, Comparison, blame_weights
from stepguard.records import Verdict

HIGH = Verdict(kind="spike", severity="suspicion", summary="high", evidence={"loss": 50.0})
PROOF = Comparison(step=96, then=2.0, again=2.0, now=48.0, this_then=2.1)


def _blamed(compared: Comparison | None = PROOF, **given: Any) -> Verdict:
    settings = {"lasting": LASTING, **given}
    return blame_weights(HIGH, reading(100, 50.0), played(SETTLED), compared=compared, **settings)


def test_independent_signs_together_blame_the_weights() -> None:
    verdict = _blamed()
    assert verdict.bad
    assert (
        "an earlier batch gives 48 and gave 2, and on the weights of step 96 this batch gives 2.1"
        in verdict.summary
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"now": 2.1}, "an earlier batch gives 2.1 and gave 2: not the weights"),
        ({"again": 40.0}, "the loss function changed"),
        ({"this_then": 49.0}, "this batch is as hard for earlier weights"),
    ],
)
def test_one_missing_sign_leaves_the_run_alone(changed: dict[str, float], why: str) -> None:
    verdict = _blamed(replace(PROOF, **changed))  # type: ignore[arg-type]
    assert verdict.severity == "note" and why in verdict.summary


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"lasting": LASTING - 1}, "it has lasted 2 of 3 steps"),
        ({}, "nothing is known of earlier weights"),
        ({"moved": 0.01}, "the weights have moved by 0.01 of their norm"),
    ],
)
def test_without_a_comparison_the_run_is_left_alone(given: dict[str, Any], why: str) -> None:
    verdict = _blamed(None, **given)
    assert verdict.severity == "note" and why in verdict.summary


def test_level_the_run_had_left_long_ago_must_be_reached_again() -> None:
    history = played(SETTLED)
    verdict = blame_weights(HIGH, reading(100, history.level + 0.5), history, LASTING, PROOF)
    assert "not lost" in verdict.summary


@pytest.mark.parametrize("now", [math.nan, math.inf])
def test_earlier_batch_that_is_no_longer_finite_counts_as_lost(now: float) -> None:
    assert _blamed(replace(PROOF, now=now)).bad


def test_without_a_replay_weights_that_left_where_they_were_good_are_blamed() -> None:
    assert _blamed(None, moved=2.5).bad
