"""Rule SG803: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, Bad, codes, found


def test_fires_with_the_numbers() -> None:
    where = None
    reading: dict[str, Any] = CALM | {
        "kind": "no_labels",
        "severity": "note",
        "loss": 0.0,
        "grad_norm": 0.0,
        "labels": 0,
    }
    said = " | ".join(found("SG803", where, **reading).evidence)
    for fragment in ("0 targets", "loss is 0, gradient norm is 0"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a small loss": (None, CALM | {"loss": 1e-9, "grad_norm": 1e-9}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG803" not in codes(where, **reading)
