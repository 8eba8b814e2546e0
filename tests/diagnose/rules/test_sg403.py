"""Rule SG403: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    INF,
    Bad,
    at,
    at_second,
    backward,
    codes,
    found,
    origin,
    out,
)
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "forward",
        "aten.reciprocal",
        at_second("self", 0.0, 0.0, 1.0, zeros=1),
        output=out(posinf=1),
        evidence=Evidence(absorbed=True, absorbed_by="aten.erf"),
    )
    reading: dict[str, Any] = BACKWARD
    said = " | ".join(found("SG403", where, **reading).evidence)
    for fragment in ("1 of 4 elements +inf", "(erf)", "backward multiplies it by 0"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "sigmoid by hand": (
        origin(
            "forward",
            "aten.exp",
            at("self", 200.0, -1.0, 200.0),
            output=out(posinf=1),
            evidence=Evidence(absorbed=True, absorbed_by="aten.reciprocal", finite_in="float64"),
        ),
        BACKWARD,
    ),
    "exp(log 0)": (
        origin(
            "forward",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, zeros=1),
            output=out(neginf=1),
            evidence=Evidence(absorbed=True, absorbed_by="aten.exp", argument="zero"),
        ),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG403"


SILENT: dict[str, Bad] = {
    "an infinity that reaches the loss": (
        origin(
            "forward", "aten.reciprocal", at_second("self", 0.0, 0.0, 1.0), output=out(posinf=1)
        ),
        {"loss": INF},
    ),
    "finite operands in backward": (
        backward(
            "aten.div",
            "SqrtBackward0",
            at_second("self", 0.0, 0.0, 0.1),
            at_second("other", 0.0, 0.0, 0.1),
        ),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG403" not in codes(where, **reading)
