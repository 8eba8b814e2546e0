"""Acceptance of a run by stages, and the verdict of `live`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from report.literals import told
from stepguard._errors import ConfigError
from stepguard.journal import RunRecord
from stepguard.records import Decision, Incident, Reading, Verdict
from stepguard.report.health import judge_run, judge_stages, parse_stage


def _record(steps: int, *, skipped: tuple[int, ...] = (), over: bool = False) -> RunRecord:
    record = RunRecord(path=Path("run"))
    record.steps = [
        {"step": n, "loss": 10.0 - n / 10, "committed": n not in skipped, "lr": [1e-4, 2e-4]}
        for n in range(steps)
    ]
    record.incidents = [
        Incident(
            id=f"{n}",
            step=n,
            verdict=Verdict(kind="spike", severity="incident"),
            reading=Reading(step=n),
        )
        for n in skipped
    ]
    record.notes = [{"type": "end"}] if over else []
    return record


def _states(record: RunRecord, *stages: str) -> list[str]:
    return [
        outcome.state for outcome in judge_stages(told(record), [parse_stage(s) for s in stages])
    ]


def test_a_stage_waits_until_its_last_step_has_come() -> None:
    assert _states(_record(49), "0-49: loss<6") == ["waiting"]
    assert _states(_record(50), "0-49: loss<6") == ["passed"]
    assert _states(_record(50), "0-49: loss<5") == ["failed"]


def test_too_many_incidents_fail_a_stage_before_it_is_over() -> None:
    assert _states(_record(10, skipped=(3,)), "0-49: incidents=0, skipped<=1") == [
        "failed",
        "waiting",
    ]


def test_the_fall_of_the_loss_and_the_largest_learning_rate_can_be_asked() -> None:
    assert _states(_record(50), "0-49: fall>4, fall>5, lr<=2e-4, lr<2e-4") == [
        "passed",
        "failed",
        "passed",
        "failed",
    ]


def test_a_number_the_journal_does_not_have_fails_at_the_end() -> None:
    assert _states(_record(50), "0-49: accuracy>0.5") == ["failed"]


@pytest.mark.parametrize(
    "text", ["", "5: loss<1", "9-3: loss<1", "0-9: loss", "0-9: loss<x", "0-9: loss!1"]
)
def test_a_stage_that_cannot_be_read_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--stage"):
        parse_stage(text)


def test_a_run_is_healthy_once_the_wanted_steps_are_there() -> None:
    assert judge_run(told(_record(9)), (), 10) == "waiting"
    assert judge_run(told(_record(10)), (), 10) == "healthy"
    assert judge_run(told(_record(9, over=True)), (), 10) == "healthy"


def test_a_run_that_ends_before_its_stage_is_unhealthy() -> None:
    outcomes = judge_stages(told(_record(9, over=True)), [parse_stage("0-49: loss<100")])
    assert judge_run(told(_record(9, over=True)), outcomes, None) == "unhealthy"


def test_a_run_that_drops_most_steps_is_unhealthy_without_any_stage() -> None:
    assert judge_run(told(_record(20, skipped=tuple(range(5, 20)))), (), 20) == "unhealthy"


def test_a_run_its_policy_stopped_is_stopped() -> None:
    record = _record(10, skipped=(9,))
    record.incidents[-1] = replace(record.incidents[-1], decision=Decision(action="stop"))
    assert judge_run(told(record), (), None) == "stopped"
