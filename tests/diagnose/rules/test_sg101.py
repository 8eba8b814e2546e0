"""Rule SG101: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import NAN, Bad, at_second, codes, found, origin, tensor
from stepguard.diagnose import RunFacts


def test_fires_with_the_numbers() -> None:
    where = origin(
        "input",
        "aten.addmm",
        tensor("x", (5, 4), -1.0, 1.0, nan=1, index=(3, 1), value=NAN),
        tensor="batch:x",
        samples=(3,),
    )
    reading: dict[str, Any] = {"bad_inputs": ("batch:x",)}
    said = " | ".join(found("SG101", where, **reading).evidence)
    for fragment in ("batch:x", "1 of 20 elements NaN", "(3, 1)", "sample 3"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "targets that are NaN on purpose and masked": (
        origin("forward", "aten.log", at_second("self", 0.0, 0.0, 1.0, zeros=1)),
        {"bad_inputs": ("batch:y",)},
    ),
    "a finite operand that comes from the batch": (
        origin("loss", "aten.log", at_second("self", -1.0, -1.0, 1.0), tensor="batch:box"),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG101" not in codes(where, **reading)


def test_bad_inputs_without_an_origin_are_still_named() -> None:
    assert codes(None, kind="nonfinite_input", bad_inputs=("batch:x",), facts=RunFacts()) == [
        "SG101"
    ]
