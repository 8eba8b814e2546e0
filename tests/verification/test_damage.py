"""The list of problems of one file: bounded, and safe to print."""

from __future__ import annotations

from pathlib import Path

from stepguard.check import bounded_file
from stepguard.check.bounded_file import ProblemList, clean


def test_text_of_a_file_is_shortened_and_cannot_control_a_terminal() -> None:
    assert clean("a\x1b[2Jb\n", 20) == "a?[2Jb?"
    assert clean("n" * 30, 10) == "nnnnnnn..."
    assert clean("n" * 10, 10) == "n" * 10


def test_problems_of_one_kind_are_listed_in_part_and_counted() -> None:
    problems = ProblemList(Path("m.pt"))
    for number in range(bounded_file.MOST_PER_KIND + 7):
        problems.add("nan", f"bad {number}", tensor="w")
    problems.add("nan", "another severity", severity="warning")
    problems.add("torn", "is empty")
    found = problems.all()
    assert len(found) == bounded_file.MOST_PER_KIND + 3
    assert found[-1].detail == "and 7 more of this kind in this file"
    assert [problem.kind for problem in found[-3:]] == ["nan", "torn", "nan"]
