"""Bad, missing, constant and repeated examples, named by index and id."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from preflight.asking import assert_found
from stepguard.check.preflight import Subject, check

FAULTS = [
    (
        "nan_in_the_data",
        "data.finite",
        "fail",
        "17 (id chat-0-17) [sound]: NaN at [3]",
        "1 of 16 values",
    ),
    ("silence", "data.constant", "warn", "9 (id chat-0-9) [sound] = 0", "16 places"),
    ("wrong_unit", "data.range", "warn", "11 (id chat-0-11)", "1 of 24"),
    ("outside_the_declared_range", "data.range", "fail", "sound spans", "allowed is -0.5 to 0.5"),
    ("value_missing", "data.missing", "warn", "sound: 1 of 24", "13 (id chat-0-13)"),
    (
        "unreadable_example",
        "data.unreadable",
        "fail",
        "19 (OSError: image file is truncated)",
        "1 example of 24",
    ),
    (
        "repeated_example",
        "data.duplicates",
        "warn",
        "21 (id another name) = 4 (id chat-0-4)",
        "4.17 %",
    ),
    (
        "leaked_example",
        "data.leak",
        "fail",
        "2 (id validation-2) = 6 (id chat-0-6)",
        "1 example of 8",
    ),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)


def text(length: int, *, used: int) -> torch.Tensor:
    """Ids from 1 to 9, padded with 0."""
    row = torch.zeros(length, dtype=torch.long)
    row[:used] = torch.arange(used) % 9 + 1
    return row


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_row_that_is_all_padding_is_a_constant_input(as_dict: bool) -> None:
    rows: list[Any] = [(text(12, used=3 + n % 9), n % 2) for n in range(30)]
    rows[17] = (text(12, used=0), 1)
    if as_dict:
        rows = [
            {"ids": ids, "attention_mask": (ids > 0).long(), "types": 0 * ids, "labels": label}
            for ids, label in rows
        ]
    outcome = check(Subject(dataset=rows), only=["data.constant"]).outcome("data.constant")
    assert outcome.status == "warn" and "17" in outcome.evidence[0]
    assert "= 0 in all 12 places" in outcome.evidence[0]
    assert outcome.evidence[0].startswith("1 input in")


def test_masks_types_and_class_maps_may_be_constant() -> None:
    rows = []
    for number in range(40):
        ids = text(16, used=16)
        background = torch.full((16,), 3) if number % 2 else ids
        rows.append({"ids": ids, "mask": ids * 0 + 1, "types": ids * 0, "map": background})
    assert check(Subject(dataset=rows), only=["data.constant"]).outcome("data.constant").status == (
        "pass"
    )
