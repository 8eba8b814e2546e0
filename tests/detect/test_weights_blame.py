"""The weights are blamed for a finite anomaly only where independent signs agree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from detect.runs import SETTLED, played, reading
from stepguard.detect.judge import LASTING, Signs, blame_weights
from stepguard.records import Verdict

HIGH = Verdict(kind="spike", severity="suspicion", summary="high", evidence={"loss": 50.0})
PROOF = Signs(
    lasting=LASTING,
    earlier_then=2.0,
    earlier_now=48.0,
    own_then=2.0,
    own_now=2.0,
    older_loss=2.1,
    older_step=96,
)


def test_independent_signs_together_blame_the_weights() -> None:
    verdict = blame_weights(HIGH, reading(100, 50.0), played(SETTLED), PROOF)
    assert verdict.bad
    assert (
        "an earlier batch gives 48 and gave 2, and on the weights of step 96 this batch gives 2.1"
        in verdict.summary
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lasting": LASTING - 1}, "it has lasted 2 of 3 steps"),
        ({"earlier_now": 2.1}, "an earlier batch gives 2.1 and gave 2: not the weights"),
        ({"own_now": 40.0}, "the loss function changed"),
        ({"older_loss": 49.0}, "this batch is as hard for earlier weights"),
        ({"own_then": None}, "no earlier step can be run again"),
        ({"earlier_now": None}, "nothing is known of earlier weights"),
        ({"earlier_now": None, "moved": 0.01}, "the weights have moved by 0.01 of their norm"),
    ],
)
def test_one_missing_sign_leaves_the_run_alone(changed: dict[str, float | None], why: str) -> None:
    verdict = blame_weights(HIGH, reading(100, 50.0), played(SETTLED), replace(PROOF, **changed))
    assert verdict.severity == "note" and why in verdict.summary


def test_level_the_run_had_left_long_ago_must_be_reached_again() -> None:
    history = played(SETTLED)
    assert (
        "not lost" in blame_weights(HIGH, reading(100, history.level + 0.5), history, PROOF).summary
    )


@pytest.mark.parametrize("now", [math.nan, math.inf])
def test_earlier_batch_that_is_no_longer_finite_counts_as_lost(now: float) -> None:
    assert blame_weights(
        HIGH, reading(100, 50.0), played(SETTLED), replace(PROOF, earlier_now=now)
    ).bad


def test_without_a_replay_weights_that_left_where_they_were_good_are_blamed() -> None:
    signs = Signs(lasting=LASTING, moved=2.5)
    assert blame_weights(HIGH, reading(100, 50.0), played(SETTLED), signs).bad
