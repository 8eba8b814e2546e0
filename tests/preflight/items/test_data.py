"""Bad, missing, constant and repeated examples, named by index and id."""

from __future__ import annotations

import pytest

from preflight.asking import assert_found

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
