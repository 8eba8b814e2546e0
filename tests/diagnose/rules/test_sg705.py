"""Rule SG705: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, Bad, codes, findings

SAME: dict[str, Any] = CALM | {
    "kind": "same_data",
    "severity": "incident",
    "loss": None,
    "summary": "ranks 0, 1 read the same batch",
    "said": {"ranks": "0, 1", "samplers": "rank 0: seed 0, rank 1: seed 7"},
}


def test_fires_alone_with_the_numbers() -> None:
    (finding,) = findings(None, **SAME)
    assert finding.code == "SG705"
    said = " | ".join(finding.evidence)
    for fragment in ("ranks 0, 1 read the same batch", "rank 1: seed 7"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a calm step": (None, CALM),
    "drifted ranks": (None, CALM | {"kind": "replica_drift"}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG705" not in codes(where, **reading)
