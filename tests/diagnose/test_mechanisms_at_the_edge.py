"""Causes at the edge of a function's domain: segments, Bessel functions, determinants, slopes that
do not exist.
"""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, codes, origin, out, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Operand, Origin


def at(name: str, value: float, low: float, high: float, **more: Any) -> Operand:
    """An operand of four elements whose first one is the bad one."""
    return tensor(name, (4,), low, high, index=(0,), value=value, **more)


LENGTHS = Operand(name="lengths", dtype="int64", shape=(4,), min=0.0, max=3.0, zeros=1)
FROM_BATCH = Evidence(argument="negative", argument_root="batch:t")
STOOD_STILL = RunFacts(losses=(1.0, 1.1, 40.0), lr_history=((0.05, 0.0), (0.05, 0.0), (0.05, 50.0)))
UNFROZEN = RunFacts(losses=(1.0, 1.1, 40.0), lr_history=((0.05, 0.0), (0.05, 0.0), (0.05, 0.05)))

CASES: dict[str, tuple[str, Origin, dict[str, Any]]] = {
    "mean of a segment of length 0": (
        "SG102",
        origin(
            "forward",
            "aten.segment_reduce",
            tensor("data", (6, 4), -1.0, 1.0),
            LENGTHS,
            output=out(nan=4),
        ),
        {},
    ),
    "Bessel function of a large concentration": (
        "SG203",
        origin(
            "loss",
            "aten.i0",
            at("self", 400.0, 0.7, 400.0),
            output=out(posinf=1),
            evidence=Evidence(finite_in="float64"),
        ),
        {},
    ),
    "log of a cosine that is rounded below 0": (
        "SG202",
        origin(
            "loss",
            "aten.log",
            at("self", -4.4e-8, -4.4e-8, 0.95),
            output=out(nan=1),
            evidence=FROM_BATCH | Evidence(argument_from="aten.cos"),
        ),
        {},
    ),
    "log of a width that the batch itself makes negative": (
        "SG104",
        origin(
            "loss",
            "aten.log",
            at("self", -4.0, -4.0, 4.0),
            output=out(nan=1),
            evidence=FROM_BATCH | Evidence(argument_from="aten.sub"),
        ),
        {},
    ),
    "digamma at its pole": (
        "SG202",
        origin("loss", "aten.digamma", at("self", 0.0, 0.0, 3.0, zeros=1), output=out(neginf=1)),
        {},
    ),
    "logdet of a mirror": (
        "SG202",
        origin(
            "forward",
            "aten.where",
            output=out((), nan=1),
            evidence=Evidence(chosen_by="aten._linalg_slogdet"),
        ),
        {},
    ),
    "slope of -p log p at 0": (
        "SG401",
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
        "SG401",
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
    "a group that stood still and now runs with a thousand times the rate of the others": (
        "SG504",
        origin("optimizer"),
        {"kind": "spike", "facts": STOOD_STILL},
    ),
    "a group that stood still and now runs with the rate of the others": (
        "SG505",
        origin("optimizer"),
        {"kind": "spike", "facts": UNFROZEN},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_of(name: str) -> None:
    expected, where, reading = CASES[name]
    said = codes(where, **reading)
    assert said and said[0] == expected, said
