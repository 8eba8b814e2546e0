"""Rule SG207: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    OWN_OPTIMIZER,
    Bad,
    at,
    at_second,
    codes,
    found,
    number,
    origin,
    out,
)
from stepguard.records import Evidence, Operand


def test_fires_with_the_numbers() -> None:
    where = origin("forward", "aten.sqrt", at_second("self", -3e-8, -3e-8, 2.0), output=out(nan=1))
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG207", where, **reading).evidence)
    for fragment in ("square root", "-3e-08", "rounding error below 0"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "variance below 0 by rounding": (
        origin(
            "forward",
            "aten.sqrt",
            at("self", -1e-7, -1e-7, 2.0),
            output=out(nan=1),
            evidence=Evidence(argument="negative"),
        ),
        {},
    ),
    "gamma correction of a negative pixel": (
        origin(
            "forward",
            "aten.pow",
            at("self", -0.1, -0.1, 1.0),
            number("exponent", 0.45),
            output=out(nan=1),
        ),
        {},
    ),
    "acos of 1.0000001": (
        origin("loss", "aten.acos", at("self", 1.0000001, 0.2, 1.0000001), output=out(nan=1)),
        {},
    ),
    "a root of a rounded eigenvalue in an optimizer": (
        origin(
            "optimizer",
            "aten.pow",
            at("self", -2.6e-7, -2.6e-7, 3.6),
            Operand(name="exponent", dtype="float", value=-0.25),
            output=out(nan=3),
            evidence=Evidence(argument="negative", argument_from="aten._linalg_eigh"),
        ),
        OWN_OPTIMIZER,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG207"


SILENT: dict[str, Bad] = {
    "a whole power of a negative number": (
        origin(
            "forward",
            "aten.pow",
            at_second("self", -1e30, -1e30, 1.0),
            number("exponent", 3),
            output=out(neginf=1),
        ),
        {},
    ),
    "acos within its range": (
        origin("forward", "aten.acos", at_second("self", 1.0, -1.0, 1.0)),
        {},
    ),
    "a root of 0": (origin("forward", "aten.sqrt", at_second("self", 0.0, 0.0, 1.0, zeros=1)), {}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG207" not in codes(where, **reading)
