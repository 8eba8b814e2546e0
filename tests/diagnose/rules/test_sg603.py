"""Rule SG603: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import NAN, Bad, codes, found, origin, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "checkpoint",
        None,
        tensor("w", (4,), 1.0, 2.0, posinf=2),
        tensor="param:w",
    )
    reading: dict[str, Any] = {"summary": "seal broken"}
    said = " | ".join(found("SG603", where, **reading).evidence)
    for fragment in ("param:w", "2 of 4 elements +inf", "seal broken"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a bad parameter in memory": (origin("state", tensor="param:w"), {}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG603" not in codes(where, **reading)


def test_state_loaded_bad_is_also_a_corrupted_checkpoint() -> None:
    where = origin("state", tensor="param:head.weight", evidence=Evidence(bad_elements=1))
    fresh = RunFacts(resumed=True, committed=0)
    assert "SG603" in codes(where, loss=NAN, bad_state=("param:head.weight",), facts=fresh)
    later = RunFacts(resumed=True, committed=40)
    assert "SG603" not in codes(where, loss=NAN, bad_state=("param:head.weight",), facts=later)
