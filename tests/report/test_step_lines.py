"""Numbers out of step lines."""

from __future__ import annotations

from report.literals import NAN
from stepguard.report.step_lines import committed, finite_values

LINES = [
    {"step": 0, "loss": 1.0},
    {"step": 1, "loss": NAN, "committed": False},
    {"step": 2, "committed": True},
    {"step": 3, "loss": 2, "committed": True},
]


def test_line_that_says_nothing_counts_as_committed() -> None:
    assert [line["step"] for line in committed(LINES)] == [0, 2, 3]


def test_missing_and_non_finite_values_are_left_out() -> None:
    assert finite_values(LINES, "loss") == [1.0, 2]
