"""Rule SG203: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    Bad,
    at,
    at_second,
    codes,
    found,
    number,
    origin,
    out,
    tensor,
)
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "forward", "aten.exp", at_second("self", 104.3, -3.0, 104.3), output=out(posinf=1)
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG203", where, **reading).evidence)
    for fragment in ("exp(104.3)", "88.72", "float32"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "log-variance of 100": (
        origin(
            "forward",
            "aten.exp",
            at("self", 100.0, -3.0, 100.0),
            output=out(posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=3.1),
        ),
        {},
    ),
    "Sinkhorn in exp space": (
        origin(
            "forward",
            "aten.exp",
            at("self", 90.3, -80.0, 90.3),
            module="mhc.2",
            output=out(posinf=2),
        ),
        {},
    ),
    "a high power": (
        origin(
            "forward",
            "aten.pow",
            at("self", 3e3, 0.1, 3e3, (4, 3)),
            number("exponent", 400.0),
            output=out((4, 3), posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=200.0),
        ),
        {},
    ),
    "exp in a backward that somebody wrote": (
        origin(
            "backward",
            "aten.exp",
            at("self", 91.4, 0.7, 91.4),
            output=out(posinf=2),
            node="MishFnBackward",
            evidence=Evidence(singular_at=91.4, finite_in="float64"),
        ),
        BACKWARD,
    ),
    "Bessel function of a large concentration": (
        origin(
            "loss",
            "aten.i0",
            at("self", 400.0, 0.7, 400.0),
            output=out(posinf=1),
            evidence=Evidence(finite_in="float64"),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG203"


SILENT: dict[str, Bad] = {
    "an exponent within the limit": (
        origin("forward", "aten.exp", at_second("self", 80.0, -3.0, 80.0)),
        {},
    ),
    "an infinite exponent": (
        origin(
            "forward",
            "aten.exp",
            tensor("self", (4,), 0.0, 1.0, posinf=1),
            output=out(posinf=1),
        ),
        {},
    ),
    "a square": (
        origin("forward", "aten.pow", at_second("self", 1e25, 1.0, 1e25), number("exponent", 2)),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG203" not in codes(where, **reading)
