"""Rule SG402: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    Bad,
    at,
    at_second,
    backward,
    codes,
    found,
    origin,
    out,
    tensor,
)
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = backward(
        "aten.mul",
        "ExpBackward0",
        at_second("self", 0.0, 0.0, 1.0, zeros=1),
        tensor("other", (4,), 1.0, 2.0, posinf=1),
        evidence=Evidence(unselected=True),
    )
    reading: dict[str, Any] = BACKWARD
    said = " | ".join(found("SG402", where, **reading).evidence)
    for fragment in ("discards", "0 * inf", "1 of 4 elements +inf"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "where around a division": (
        origin(
            "forward",
            "aten.div",
            at("self", 1.0, 1.0, 1.0),
            at("other", 0.0, 0.0, 1.0, zeros=1),
            output=out(posinf=1),
            evidence=Evidence(unselected=True, zero_denominator=True),
        ),
        BACKWARD,
    ),
    "where around a log": (
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, 0.0, 1.0, zeros=1),
            at("other", 0.0, 0.0, 1.0, zeros=1),
            node="LogBackward0",
            output=out(nan=1),
            evidence=Evidence(unselected=True),
        ),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG402"


SILENT: dict[str, Bad] = {
    "a gradient that is not zero": (
        backward(
            "aten.div",
            "SqrtBackward0",
            at_second("self", 1.0, 1.0, 1.0),
            at_second("other", 0.0, 0.0, 1.0),
        ),
        BACKWARD,
    ),
    "a NaN loss": (
        backward(
            "aten.mul",
            "MulBackward0",
            at_second("self", 0.0, 0.0, 0.0),
            tensor("other", (4,), 0.0, 1.0, nan=1),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG402" not in codes(where, **reading)
