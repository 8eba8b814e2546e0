"""Rule SG302: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import HALF, Bad, at, at_second, codes, found, origin, out, tensor
from stepguard.records import Evidence

BRAIN = "bfloat16"


def test_fires_with_the_numbers() -> None:
    where = origin(
        "forward",
        "aten.rsqrt",
        at_second("self", 0.0, 0.0, 1.0, dtype=HALF, zeros=1),
        evidence=Evidence(eps_underflow=True, eps=1e-08),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG302", where, **reading).evidence)
    for fragment in ("eps=1e-08 is 0 in float16", "5.96e-08"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "F.normalize in float16": (
        origin(
            "forward",
            "aten.div",
            at("self", 0.0, 0.0, 0.0, dtype=HALF, zeros=4),
            at("other", 0.0, 0.0, 0.0, dtype=HALF, zeros=4),
            output=out(dtype=HALF, nan=4),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.clamp_min",
                zero_numerator=True,
                half_precision=True,
            ),
        ),
        {},
    ),
    "log(p + 1e-8) in float16": (
        origin(
            "loss",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, dtype=HALF, zeros=2),
            output=out(dtype=HALF, neginf=2),
            evidence=Evidence(argument="zero", argument_from="aten.add", half_precision=True),
        ),
        {},
    ),
    "1 - t in bfloat16": (
        origin(
            "loss",
            "aten.reciprocal",
            at("self", 0.0, 0.0, 0.9, dtype=BRAIN, zeros=1),
            output=out(dtype=BRAIN, posinf=1),
            evidence=Evidence(
                zero_denominator=True, denominator_from="aten.rsub", half_precision=True
            ),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG302"


SILENT: dict[str, Bad] = {
    "a zero in float32": (
        origin("forward", "aten.rsqrt", at_second("self", 0.0, 0.0, 1.0, zeros=1)),
        {},
    ),
    "an overflow in float16": (
        origin(
            "forward",
            "aten.mm",
            tensor("self", (2, 2), 1.0, 9e3, dtype=HALF),
            output=out(dtype=HALF, posinf=1),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG302" not in codes(where, **reading)


def test_epsilon_that_vanished_before_a_root_is_the_cause() -> None:
    where = origin(
        "forward",
        "aten.div",
        tensor("self", (4,), -0.4, 0.4, dtype="float16"),
        tensor("other", (4, 1), 0.0, 0.3, zeros=1, dtype="float16"),
        output=out(nan=4, dtype="float16"),
        evidence=Evidence(zero_denominator=True, denominator_from="aten.sqrt", eps_vanished=1e-08),
    )
    assert codes(where)[0] == "SG302"
