"""Rule SG601: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import HUGE, NAN, UPDATE, Bad, codes, found, origin, out, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "state",
        "aten.mm",
        tensor("w", (2, 2), 0.1, 0.2, nan=3, index=(0, 1), value=NAN),
        tensor="param:w",
    )
    reading: dict[str, Any] = {
        "step": 0,
        "bad_state": ("param:w", "param:b"),
        "kind": "nonfinite_parameter",
    }
    said = " | ".join(found("SG601", where, **reading).evidence)
    for fragment in (
        "param:w",
        "before the first step",
        "3 of 4 elements NaN",
        "(0, 1)",
        "2 parameters",
    ):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "memory nobody wrote": (
        origin("forward", "aten.empty", output=out(nan=4), evidence=Evidence(uninitialised=True)),
        {},
    ),
    "a weight of 1e38 before the first update": (
        origin(
            "forward",
            "aten.bmm",
            tensor("mat2", (1, 6, 18), -3e38, 3e38),
            output=out(posinf=9),
            evidence=HUGE,
        ),
        {"loss": NAN, "facts": RunFacts(committed=0)},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG601"


SILENT: dict[str, Bad] = {
    "a parameter this step's update made bad": (None, UPDATE | {"bad_state": ("param:w",)}),
    "a bad buffer": (
        origin("state", tensor="buffer:bn.running_var"),
        {"bad_state": ("buffer:bn.running_var",)},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG601" not in codes(where, **reading)
