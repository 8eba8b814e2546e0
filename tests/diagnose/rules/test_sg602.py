"""Rule SG602: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, Bad, codes, found, origin, tensor


def test_fires_with_the_numbers() -> None:
    where = origin(
        "state", None, tensor("rv", (4,), 1.0, 2.0, nan=1), tensor="buffer:bn.running_var"
    )
    reading: dict[str, Any] = CALM | {
        "kind": "nonfinite_buffer",
        "bad_state": ("buffer:bn.running_var",),
    }
    said = " | ".join(found("SG602", where, **reading).evidence)
    for fragment in ("buffer:bn.running_var", "1 of 4 elements NaN", "evaluation will be NaN"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a bad parameter beside it": (
        origin("state", tensor="param:w"),
        {"bad_state": ("param:w", "buffer:bn.running_var")},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG602" not in codes(where, **reading)
