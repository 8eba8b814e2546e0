"""Targets that do not count, classes out of range, answers cut off."""

from __future__ import annotations

import pytest

from preflight.asking import assert_found

FAULTS = [
    ("no_label_counts", "labels.empty", "fail", "1 example of 24", "5 (id chat-0-5)"),
    ("class_out_of_range", "labels.range", "fail", "16 classes", "99 in example 7 (id chat-0-7)"),
    (
        "answers_cut_off",
        "labels.truncated",
        "warn",
        "2 answers of 24",
        "2 (id chat-0-2), 3 (id chat-0-3)",
    ),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)
