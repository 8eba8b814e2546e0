"""Targets that do not count, classes out of range, answers cut off."""

from __future__ import annotations

import pytest
import torch

from preflight.asking import assert_found
from stepguard.check.preflight import Subject, check

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


@pytest.mark.parametrize("between", [(), (torch.tensor(7),)])
def test_the_last_part_of_a_tuple_is_the_target(between: tuple[torch.Tensor, ...]) -> None:
    rows = [(torch.rand(4), *between, torch.tensor(n % 3)) for n in range(12)]
    result = check(Subject(dataset=rows), only=["labels.range"])
    assert "targets span 0 to 2" in result.outcome("labels.range").evidence[0]


def test_real_targets_of_a_tuple_are_not_classes() -> None:
    rows = [(torch.rand(4), torch.rand(1)) for _ in range(12)]
    outcome = check(Subject(dataset=rows), only=["labels.range"]).outcome("labels.range")
    assert outcome.status == "not_applicable"
