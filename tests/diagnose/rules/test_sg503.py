"""Rule SG503: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, Bad, at_second, codes, found, origin
from stepguard.diagnose import RunFacts


def test_fires_with_the_numbers() -> None:
    where = origin("state", tensor="opt:exp_avg")
    reading: dict[str, Any] = CALM | {
        "bad_state": ("opt:exp_avg",),
        "kind": "nonfinite_optimizer_state",
    }
    said = " | ".join(found("SG503", where, **reading).evidence)
    for fragment in ("opt:exp_avg", "before this step", "restored without it"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "moments whose squares a checkpoint lost": (
        origin("optimizer"),
        {
            "kind": "spike",
            "loss": 80.0,
            "grads_finite": True,
            "lr": (1e-2,),
            "facts": RunFacts(lost_squares=52),
        },
    ),
    "moments kept when the weights were restored": (
        origin("state", "aten.lerp_", tensor="opt:exp_avg"),
        {"grads_finite": True, "kind": "nonfinite_optimizer_state", "bad_state": ("opt:exp_avg",)},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG503"


SILENT: dict[str, Bad] = {
    "a bad parameter": (origin("state", tensor="param:w"), {"bad_state": ("param:w",)}),
    "a cause in forward": (
        origin("forward", "aten.log", at_second("self", 0.0, 0.0, 1.0)),
        {"bad_state": ("opt:exp_avg",)},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG503" not in codes(where, **reading)


def test_moments_that_took_the_weights_along_are_the_cause() -> None:
    bad = {"bad_state": ("param:w", "opt:exp_avg"), "kind": "nonfinite_parameter"}
    where = origin("state", "aten.addmm", tensor="param:w")
    assert codes(where, **bad, step=7) == ["SG503", "SG601"]
    assert (
        codes(where, **bad, step=0)[0] == "SG601"
    )  # before the first step, both were loaded that way
