"""Rule SG703: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import Bad, codes, found, origin
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin("forward", evidence=Evidence(compiled_only=True))
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG703", where, **reading).evidence)
    for fragment in ("compiled", "eagerly"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "only the compiled step": (
        origin("forward", reproduced=False, evidence=Evidence(compiled_only=True)),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG703"


SILENT: dict[str, Bad] = {
    "a transient": (origin("forward", reproduced=False, evidence=Evidence()), {}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG703" not in codes(where, **reading)
