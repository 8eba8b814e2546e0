"""Rule SG701: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import Bad, codes, found, origin
from stepguard.diagnose import RunFacts


def test_fires_with_the_numbers() -> None:
    where = origin("input", tensor="batch:x")
    reading: dict[str, Any] = {"bad_ranks": (3,), "facts": RunFacts(world_size=8)}
    said = " | ".join(found("SG701", where, **reading).evidence)
    for fragment in ("rank 3 of 8", "the others were finite"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "every rank": (None, {"bad_ranks": (0, 1), "facts": RunFacts(world_size=2)}),
    "one process": (None, {"bad_ranks": (0,), "facts": RunFacts(world_size=1)}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG701" not in codes(where, **reading)
