"""What counts as a recipe that works, judged from literal outcomes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from recipes.common.expect import Expectation, problems
from recipes.common.outcome import Mode, Outcome, first_bad

from stepguard.records import Decision, Finding, Incident, Origin, Reading, Verdict

EXPECTED = Expectation(
    metric="NMSE", ops=("aten.log",), causes=("SG202",), relative=0.1, source="unet.py"
)


def incident(step: int = 3, op: str = "aten.log", code: str = "SG202") -> Incident:
    return Incident(
        id="one",
        step=step,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=Reading(step=step, loss=float("nan")),
        origin=Origin(step=step, phase="forward", op=op, source="somewhere/unet.py:7"),
        findings=(Finding(code=code, title="title", evidence=("numbers",), certainty="certain"),),
        decision=Decision(action="skip"),
    )


def outcomes(**changed: Outcome) -> dict[Mode, Outcome]:
    fine = Outcome(mode="healthy", losses=(1.0, 0.5), first_bad=None, metric=0.05, tensors=4)
    dead = replace(fine, mode="unguarded", first_bad=3, metric=float("nan"), bad_parameters=4)
    guarded = replace(fine, mode="guarded", first_bad=3, metric=0.052, incidents=(incident(),))
    found: dict[Mode, Outcome] = {"healthy": fine, "unguarded": dead, "guarded": guarded}
    return {mode: changed.get(mode, outcome) for mode, outcome in found.items()}


def test_a_run_that_is_found_named_and_survived_has_no_problem() -> None:
    assert problems(EXPECTED, outcomes()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"incidents": (incident(step=4),)}, "first bad step 3, detected at 4"),
        ({"incidents": (incident(op="aten.sin"),)}, "origin aten.sin, expected one of aten.log"),
        ({"incidents": (incident(code="SG203"),)}, "cause SG203, expected one of SG202"),
        ({"incidents": ()}, "guarded, no incident was recorded"),
        ({"bad_buffers": 1}, "guarded, 0 parameters and 1 buffers are bad"),
        ({"metric": 0.056}, "NMSE is 0.056 guarded and 0.05 healthy"),
        ({"metric": float("nan")}, "NMSE is nan guarded and 0.05 healthy"),
    ],
)
def test_every_shortcoming_of_the_guarded_run_is_said(change: dict[str, object], said: str) -> None:
    guarded = replace(outcomes()["guarded"], **change)

    assert said in problems(EXPECTED, outcomes(guarded=guarded))


def test_an_unguarded_run_that_lives_proves_nothing() -> None:
    alive = replace(outcomes()["unguarded"], bad_parameters=0)

    assert problems(EXPECTED, outcomes(unguarded=alive)) == [
        "the unguarded run ended without a bad tensor, so nothing was survived"
    ]


def test_a_ruin_may_be_seen_before_anything_is_non_finite_but_not_after() -> None:
    early = replace(EXPECTED, early=True)
    guarded = replace(outcomes()["guarded"], first_bad=None)

    assert (
        problems(
            early, outcomes(guarded=replace(guarded, incidents=(incident(step=2, op="aten.mul"),)))
        )
        == []
    )
    assert problems(early, outcomes(guarded=replace(guarded, incidents=(incident(step=5),)))) == [
        "first bad step 3, detected at 5"
    ]


def test_the_first_bad_step_is_the_first_loss_or_norm_that_is_not_finite() -> None:
    assert first_bad([1.0, 1.0], [1.0, 1.0]) is None
    assert first_bad([1.0, math.nan], [1.0, math.nan]) == 1
    assert first_bad([1.0, 1.0, math.nan], [math.inf, 1.0, 1.0]) == 0
