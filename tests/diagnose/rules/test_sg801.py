"""Rule SG801: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, HALF, Bad, codes, found, origin, tensor, traced_in
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = traced_in("float16")
    reading: dict[str, Any] = CALM | {
        "facts": RunFacts(configured_dtype="bfloat16", scaling="none")
    }
    said = " | ".join(found("SG801", where, **reading).evidence)
    for fragment in ("bfloat16 is configured", "gives float16", "without a loss scale", "6e-08"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "float16 with a scaler": (
        traced_in(HALF),
        CALM | {"facts": RunFacts(scaling="dynamic")},
    ),
    "bfloat16 as configured": (
        traced_in("bfloat16"),
        CALM | {"facts": RunFacts(configured_dtype="bfloat16", scaling="none")},
    ),
    "a precision that no replay has seen": (
        origin("loss"),
        CALM | {"facts": RunFacts(configured_dtype="bfloat16", scaling="none")},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG801" not in codes(where, **reading)


def test_autocast_seen_in_the_replay_counts_for_the_settings() -> None:
    where = origin(
        "backward",
        "aten.mul",
        tensor("self", (4,), 0.0, 0.0),
        evidence=Evidence(autocast="float16"),
    )
    assert "SG801" in codes(where, facts=RunFacts(scaling="none"))
    assert "SG801" not in codes(where, facts=RunFacts(scaling="dynamic"))
