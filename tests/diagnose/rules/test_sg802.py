"""Rule SG802: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, Bad, codes, found
from stepguard.diagnose import RunFacts


def test_fires_with_the_numbers() -> None:
    where = None
    reading: dict[str, Any] = CALM | {
        "kind": "lr_mismatch",
        "severity": "note",
        "lr": (5e-4,),
        "facts": RunFacts(configured_lr=(1e-4,), resumed=True),
    }
    said = " | ".join(found("SG802", where, **reading).evidence)
    for fragment in ("lr 0.0001", "0.0005", "was loaded"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a rate below the configured one": (
        None,
        CALM | {"lr": (1e-5,), "facts": RunFacts(configured_lr=(1e-4,), resumed=True)},
    ),
    "a run that was not resumed": (
        None,
        CALM | {"kind": "lr_mismatch", "lr": (5e-4,), "facts": RunFacts(configured_lr=(1e-4,))},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG802" not in codes(where, **reading)
