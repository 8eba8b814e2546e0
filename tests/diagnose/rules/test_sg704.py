"""Rule SG704: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, Bad, codes, findings, found, origin

DRIFT: dict[str, Any] = CALM | {
    "kind": "replica_drift",
    "severity": "incident",
    "loss": None,
    "said": {"ranks": "2", "agree": "0, 1, 3", "tensor": "param:0.weight", "parameters": 4},
}


def test_fires_with_the_numbers() -> None:
    said = " | ".join(found("SG704", None, **DRIFT).evidence)
    for fragment in ("rank 2", "rank 0, 1, 3", "4 parameters", "`param:0.weight`"):
        assert fragment in said


def test_no_majority_is_said() -> None:
    two = DRIFT | {"said": {"ranks": "0, 1", "rates": "rank 0: 0.1, rank 1: 0.05"}}
    said = " | ".join(found("SG704", None, **two).evidence)
    assert "no majority" in said
    assert "rank 1: 0.05" in said


def test_is_the_only_finding() -> None:
    where = origin("state", rank=2, method="comparison of the ranks")
    assert [finding.code for finding in findings(where, **DRIFT)] == ["SG704"]


SILENT: dict[str, Bad] = {
    "a calm step": (None, CALM),
    "a bad parameter of one rank": (None, {"bad_ranks": (1,), "kind": "nonfinite_parameter"}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG704" not in codes(where, **reading)
