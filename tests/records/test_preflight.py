"""The outcome of a check, read by status, section and id."""

from __future__ import annotations

import pytest

from stepguard.records.checks import Outcome, Preflight

RESULT = Preflight(
    target="train:build",
    outcomes=(
        Outcome(id="lr.config", title="lr", status="warn"),
        Outcome(id="data.finite", title="data", status="fail"),
    ),
)


def test_warning_is_allowed_and_a_failure_is_not() -> None:
    assert not RESULT.ok
    assert Preflight(target="", outcomes=RESULT.outcomes[:1]).ok


def test_outcomes_are_found_by_status_and_by_id() -> None:
    assert [outcome.id for outcome in RESULT.of("fail", "pass")] == ["data.finite"]
    assert RESULT.outcome("lr.config").section == "lr"
    with pytest.raises(KeyError):
        RESULT.outcome("lr.schedule")
