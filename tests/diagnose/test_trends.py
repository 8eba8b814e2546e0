"""Learning rates and losses of recent steps."""

from __future__ import annotations

from typing import Any

import pytest

from stepguard.diagnose import Case, RunFacts, diagnose
from stepguard.diagnose.rules.sg500 import growth, lr_climb, lr_jump, lr_not_a_number, rising
from stepguard.records import Incident, Reading, Verdict


def case(lr: tuple[float, ...] = (), **facts: Any) -> Case:
    verdict = Verdict(kind="spike", severity="incident")
    return Case(reading=Reading(step=9, lr=lr), verdict=verdict, facts=RunFacts(**facts))


def evidence(code: str, lr: tuple[float, ...], **facts: Any) -> str:
    """What the finding of this code says about these rates."""
    one = case(lr, **facts)
    incident = Incident(id="1", step=9, reading=one.reading, verdict=one.verdict)
    (found,) = [finding for finding in diagnose(incident, one.facts) if finding.code == code]
    return "; ".join(found.evidence)


def test_a_rate_far_above_all_before_it_is_a_jump() -> None:
    jump = lr_jump(case((0.5,), lr_history=((0.1,), (0.1,), (0.5,))))
    assert jump is not None
    assert (jump.before, jump.now, jump.steps) == (0.1, 0.5, 0)
    said = evidence("SG504", (0.5,), lr_history=((0.1,), (0.1,), (0.5,)))
    assert "5 times the rate before (0.1), in this very step" in said


def test_a_linear_warm_up_is_not_a_jump() -> None:
    assert lr_jump(case((0.3,), lr_history=((0.1,), (0.2,), (0.3,)))) is None


def test_a_restarted_schedule_is_a_jump_although_the_rate_was_seen_before() -> None:
    jump = lr_jump(case((1.0,), lr_history=((1.0,), (0.1,), (1.0,))))
    assert jump is not None and jump.before == 0.1


def test_a_group_that_stood_still_is_measured_by_the_others() -> None:
    jump = lr_jump(case((0.1, 5.0), lr_history=((0.1, 0.0), (0.1, 5.0))))
    assert jump is not None and (jump.group, jump.before) == (1, 0.1)


def test_an_earlier_jump_says_how_long_ago_it_was() -> None:
    said = evidence("SG504", (0.5,), lr_history=((0.1,), (0.5,), (0.5,)))
    assert "1 step before the bad one" in said


def test_a_rate_above_the_configured_one_is_a_jump() -> None:
    jump = lr_jump(case((0.5,), configured_lr=(0.1,)))
    assert jump is not None and jump.steps is None
    assert "the configured rate" in evidence("SG504", (0.5,), configured_lr=(0.1,))


def test_the_judge_may_have_seen_the_jump() -> None:
    verdict = Verdict(
        kind="spike", severity="incident", evidence={"group": 1, "lr": 3.0, "ceiling": 1.0}
    )
    jump = lr_jump(Case(reading=Reading(step=9), verdict=verdict))
    assert jump is not None and (jump.group, jump.times) == (1, 3.0)


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_is_not_a_number_is_found(rate: float) -> None:
    assert lr_not_a_number(case((0.1, rate))) == 1
    assert lr_not_a_number(case((0.1, 0.2))) is None


def test_a_rate_above_everything_declared_is_a_runaway() -> None:
    facts: dict[str, Any] = {"first_lr": (0.1,), "initial_lr": (0.2,), "committed": 50}
    climb = lr_climb(case((0.9,), **facts))
    assert climb is not None and climb.runaway
    said = evidence("SG505", (0.9,), **facts)
    assert "grown from 0.1 to 0.9 over 50 steps and is 4.5 times initial_lr (0.2)" in said


def test_a_rate_that_hardly_grew_is_not_a_climb() -> None:
    assert lr_climb(case((0.15,), first_lr=(0.1,))) is None


def test_growth_is_measured_from_the_smallest_value_before() -> None:
    assert growth((4.0, 2.0, 20.0)) == 10.0
    assert growth((1.0,)) == 1.0
    assert growth((0.0, 5.0)) == 1.0


def test_a_run_is_rising_when_losses_or_norms_grew_tenfold() -> None:
    assert rising(case(losses=(1.0, 10.0)))
    assert rising(case(grad_norms=(1.0, 12.0)))
    assert not rising(case(losses=(1.0, 9.0), grad_norms=(1.0, 2.0)))
