"""Rule SG501: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, CALM, INF, Bad, codes, found, origin, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "optimizer",
        "aten._foreach_norm",
        tensor("self[0]", (9,), 1e20, 3e20),
        evidence=Evidence(finite_norm=9e20),
    )
    reading: dict[str, Any] = CALM | {
        "kind": "infinite_norm",
        "grad_norm": INF,
        "facts": RunFacts(clip_norm=0.5),
    }
    said = " | ".join(found("SG501", where, **reading).evidence)
    for fragment in ("3e+20", "9e+20", "clip_grad_norm_ to 0.5", "0.5 / inf = 0"):
        assert fragment in said


SILENT: dict[str, Bad] = {
    "a loss that is infinite itself": (
        None,
        CALM | {"loss": INF, "kind": "nonfinite_loss", "grad_norm": INF},
    ),
    "bad elements": (None, BACKWARD | {"grad_norm": INF}),
    "a finite norm": (None, CALM | {"grad_norm": 1e30}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG501" not in codes(where, **reading)
