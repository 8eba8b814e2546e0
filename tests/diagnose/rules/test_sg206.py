"""Rule SG206: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import INF, Bad, at_second, codes, found, origin, out, tensor
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "loss",
        "aten.mul",
        tensor("self", (4,), 0.0, 1.0, neginf=1, index=(1,), value=-INF),
        tensor("other", (4,), 0.0, 1.0, zeros=2, index=(1,), value=0.0),
        output=out(nan=1),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG206", where, **reading).evidence)
    for fragment in ("0 * inf is NaN", "1 of 4 elements -inf", "2 of 4 elements zero"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "loss of padding multiplied by its mask": (
        origin(
            "loss",
            "aten.mul",
            tensor("self", (4,), 0.1, 0.3, neginf=1, index=(1,), value=-INF),
            tensor("other", (4,), 0.0, 1.0, zeros=1, index=(1,), value=0.0),
            output=out(nan=1),
            evidence=Evidence(intended_inf=True),
        ),
        {},
    ),
    "difference of two masked scores": (
        origin(
            "loss",
            "aten.sub",
            tensor("self", (4,), 0.1, 0.3, neginf=1, index=(1,), value=-INF),
            tensor("other", (4,), 0.2, 0.4, neginf=1, index=(1,), value=-INF),
            output=out(nan=1),
            evidence=Evidence(intended_inf=True),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG206"


SILENT: dict[str, Bad] = {
    "finite factors": (
        origin(
            "forward",
            "aten.mul",
            at_second("self", 1e30, 1.0, 1e30),
            at_second("other", 1e30, 1.0, 1e30),
            output=out(posinf=1),
        ),
        {},
    ),
    "a NaN that came in": (
        origin(
            "forward",
            "aten.mul",
            tensor("self", (4,), 0.0, 1.0, nan=1, posinf=1),
            output=out(nan=1),
        ),
        {},
    ),
    "a softmax over a masked row": (
        origin(
            "forward",
            "aten._softmax",
            tensor("self", (2, 3), 0.0, 1.0, neginf=3),
            output=out(nan=3),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG206" not in codes(where, **reading)
