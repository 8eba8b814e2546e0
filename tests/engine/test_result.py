"""What `guard.step` returns: read once, on first access."""

from __future__ import annotations

from stepguard.engine.result import StepResult
from stepguard.records import Incident, Reading, Verdict


def _incident() -> Incident:
    verdict = Verdict(kind="nonfinite_loss", severity="incident")
    return Incident(id="1", step=1, verdict=verdict, reading=Reading(step=1))


def test_unread_result_settles_on_first_access_only() -> None:
    calls: list[int] = []

    def settle() -> None:
        calls.append(1)
        result.resolve(Reading(step=0, loss=2.0, grad_norm=3.0), committed=True)

    result = StepResult(settle=settle)
    assert repr(result) == "StepResult(not read yet)"
    assert calls == []
    assert (result.loss, result.grad_norm, result.committed) == (2.0, 3.0, True)
    assert calls == [1]


def test_result_of_a_disarmed_guard_has_no_numbers() -> None:
    result = StepResult().resolve(None, committed=True)
    assert (result.loss, result.grad_norm, result.committed) == (None, None, True)


def test_second_run_answers_for_the_incident_unless_it_has_its_own() -> None:
    first = _incident()
    calm = StepResult().resolve(Reading(step=1), committed=True)
    assert calm.answering(first).incident is first
    second = _incident()
    bad = StepResult().resolve(Reading(step=1), committed=False, incident=second)
    assert bad.answering(first).incident is second
