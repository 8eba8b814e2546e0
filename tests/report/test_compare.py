"""Two runs side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from report.literals import as_json, told
from stepguard.records import Decision, Finding, Incident, Origin, Reading, Verdict
from stepguard.report.run_report import render_comparison as render_terminal
from stepguard.report.summary import RunComparison
from stepguard.report.summary import compare as compare_runs

NAN = float("nan")


@dataclass
class _Run:
    path: str
    header: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0


def compare(first: _Run, second: _Run) -> RunComparison:
    return compare_runs(told(first), told(second))


def _steps(bad: int, *, committed: bool) -> list[dict[str, Any]]:
    return [
        {
            "step": n,
            "loss": NAN if n == bad else 2.0 - n / 10,
            "grad_norm": 1.0,
            "committed": n != bad or committed,
        }
        for n in range(10)
    ]


def _incident() -> Incident:
    return Incident(
        id="5-0",
        step=5,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=Reading(step=5),
        origin=Origin(step=5, phase="forward", module="emb", op="aten.log", source="m.py:3"),
        findings=(Finding(code="SG202", title="log of a non-positive value", certainty="certain"),),
        decision=Decision(action="skip"),
    )


ORIGINAL = _Run("runs/original/journal.jsonl", steps=_steps(5, committed=True))
STABLE = _Run(
    "runs/stable/journal.jsonl",
    header={"config": {"clip_norm": 0.5}},
    steps=_steps(5, committed=False),
    incidents=[_incident()],
)


def _row(aspect: str) -> Any:
    return next(row for row in compare(ORIGINAL, STABLE).rows if row.aspect == aspect)


def test_a_bad_step_that_was_committed_is_counted_against_its_run() -> None:
    row = _row("bad steps committed")
    assert (row.first, row.second, row.better) == ("1", "0", "second")


def test_what_was_done_and_the_cause_are_named_for_each_run() -> None:
    assert _row("what was done").second == "skipped 1"
    assert "SG202" in _row("first origin and cause").second
    assert _row("first origin and cause").first == "-"


def test_equal_numbers_favour_nobody() -> None:
    assert _row("best loss").better == "same"


def test_settings_that_differ_are_listed_with_both_values() -> None:
    assert compare(ORIGINAL, STABLE).settings == {"clip_norm": (None, 0.5)}


def test_the_table_carries_both_runs_names_and_every_aspect() -> None:
    comparison = compare(ORIGINAL, STABLE)
    text = render_terminal(comparison)
    assert "original" in text.splitlines()[0]
    assert "stable" in text.splitlines()[0]
    assert all(row.aspect in text for row in comparison.rows)
    assert "default" in text


def test_json_is_strict() -> None:
    assert json.loads(as_json(compare(ORIGINAL, STABLE)))["first"].endswith("journal.jsonl")


@pytest.mark.parametrize("empty", [_Run("empty"), _Run("header", header={"config": {}})])
def test_a_run_without_steps_can_be_compared(empty: _Run) -> None:
    assert "0 of 0 committed" in render_terminal(compare(empty, STABLE))


def test_an_unguarded_loop_that_keeps_its_own_record_has_read_no_loss_before_backward() -> None:
    alone = _Run("a/journal.jsonl", header={"guarded": False}, steps=_steps(5, committed=True))
    guarded = _Run("b/journal.jsonl", steps=_steps(5, committed=False))
    aspect = "losses judged before the update"
    (row,) = (row for row in compare(alone, guarded).rows if row.aspect == aspect)

    assert (row.first, row.second) == ("0", "10")
