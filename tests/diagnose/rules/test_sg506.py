"""Rule SG506: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, Bad, codes, found


def test_fires_with_the_numbers() -> None:
    where = None
    reading: dict[str, Any] = BACKWARD | {"kind": "scaler_collapse", "scale": 0.5}
    said = " | ".join(found("SG506", where, **reading).evidence)
    for fragment in ("0.5, below 1", "never move"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a scale that calibrates itself": (None, BACKWARD | {"scale": 32768.0}),
    "no scaler": (None, BACKWARD),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG506" not in codes(where, **reading)
