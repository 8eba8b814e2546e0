"""Rule SG401: when it fires, comes first, and stays silent."""

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
        "aten.div",
        "SqrtBackward0",
        at_second("self", 1.0, 0.1, 1.0),
        at_second("other", 0.0, 0.0, 2.0, zeros=1),
    )
    reading: dict[str, Any] = BACKWARD
    said = " | ".join(found("SG401", where, **reading).evidence)
    for fragment in ("sqrt(x) at x = 0", "SqrtBackward0", "at index (1,)", "1 of 4 elements zero"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "acos of exactly 1": (
        origin(
            "backward",
            "aten.rsqrt",
            at("self", 0.0, 0.0, 0.7, zeros=1),
            node="AcosBackward0",
            output=out(posinf=1),
        ),
        BACKWARD,
    ),
    "eigh of equal eigenvalues": (
        origin(
            "backward",
            "aten.div_",
            at("self", 0.0, 0.0, 0.0, (3, 3), zeros=9),
            at("other", 0.0, 0.0, 1.0, (3, 3), zeros=6),
            node="LinalgEighBackward0",
            output=out((3, 3), nan=6),
        ),
        BACKWARD,
    ),
    "distance between equal points": (
        origin(
            "backward",
            "aten.div",
            at("self", 1.0, 1.0, 1.0),
            at("other", 0.0, 0.0, 2.0, zeros=1),
            node="SqrtBackward0",
        ),
        BACKWARD,
    ),
    "silence against a silent reference": (
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, 0.0, 0.1, zeros=1),
            at("other", 0.0, 0.0, 2.0, zeros=1),
            node="SqrtBackward0",
            output=out(nan=1),
            evidence=Evidence(zero_upstream_gradient=True, singular_at=0.0),
        ),
        BACKWARD,
    ),
    "angle of zero": (
        origin(
            "backward", "aten.reciprocal", at("self", 0.0, 0.0, 1.0, zeros=1), node="Atan2Backward0"
        ),
        BACKWARD,
    ),
    "slope of -p log p at 0": (
        origin(
            "backward",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, zeros=2),
            node="SpecialEntrBackward0",
            output=out(neginf=2),
        ),
        BACKWARD,
    ),
    "slope of x log y at 0": (
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, 0.0, 0.1, zeros=2),
            at("other", 0.0, 0.0, 0.6, zeros=2),
            node="XlogyBackward0",
            output=out(nan=2),
        ),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG401"


SILENT: dict[str, Bad] = {
    "a forward root": (origin("forward", "aten.sqrt", at_second("self", 0.0, 0.0, 1.0)), {}),
    "a discarded branch": (
        backward(
            "aten.div",
            "SqrtBackward0",
            at_second("other", 0.0, 0.0, 1.0),
            evidence=Evidence(unselected=True),
        ),
        BACKWARD,
    ),
    "a product in backward with ordinary operands": (
        backward("aten.mm", "MmBackward0", tensor("self", (2, 2), 0.0, 1.0, nan=1)),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG401" not in codes(where, **reading)
