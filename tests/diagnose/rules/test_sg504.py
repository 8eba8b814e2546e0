"""Rule SG504: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import CALM, NAN, Bad, at, codes, found, origin, out
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence

JUMPED = RunFacts(losses=(1.0, 1.1, 40.0), lr_history=((0.001,), (0.001,), (0.03,), (0.03,)))

STOOD_STILL = RunFacts(losses=(1.0, 1.1, 40.0), lr_history=((0.05, 0.0), (0.05, 0.0), (0.05, 50.0)))


def test_fires_with_the_numbers() -> None:
    where = origin("optimizer", "aten.add_")
    reading: dict[str, Any] = CALM | {
        "kind": "spike",
        "lr": (4.0,),
        "facts": RunFacts(lr_history=((0.01,), (0.01,), (4.0,), (4.0,))),
    }
    said = " | ".join(found("SG504", where, **reading).evidence)
    for fragment in ("lr 4", "400 times", "0.01", "1 step before"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "weights that ran away after a jump of the rate": (
        origin(
            "forward",
            "aten.exp",
            at("self", 316.0, -2.0, 316.0),
            output=out(posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=3.1),
        ),
        {"facts": JUMPED, "lr": (0.03,)},
    ),
    "a rate that is not a number": (
        origin("optimizer", "aten.add_", tensor="param:w"),
        {"grads_finite": True, "kind": "nonfinite_parameter", "state_born": True, "lr": (NAN,)},
    ),
    "warm-up thrown back to its peak": (
        origin("optimizer", "aten.add_"),
        {
            "kind": "spike",
            "loss": 80.0,
            "grads_finite": True,
            "lr": (1e-2,),
            "facts": RunFacts(lr_history=((1e-2,), (4e-3,), (1e-3,), (1e-3,), (1e-2,))),
        },
    ),
    "a group that stood still and now runs with a thousand times the rate of the others": (
        origin("optimizer"),
        {"kind": "spike", "facts": STOOD_STILL},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG504"


SILENT: dict[str, Bad] = {
    "a linear warm-up": (
        origin("optimizer", "aten.add_"),
        CALM
        | {
            "kind": "spike",
            "facts": RunFacts(lr_history=tuple((1e-4 * i,) for i in range(12))),
        },
    ),
    "a OneCycle schedule far above its first rate": (
        origin("optimizer", "aten.add_"),
        CALM
        | {
            "kind": "spike",
            "lr": (1e-2,),
            "facts": RunFacts(
                configured_lr=(4e-4,),
                lr_history=((8e-3,), (9e-3,), (1e-2,)),
                losses=(1.0,),
                committed=900,
            ),
        },
    ),
    "a cosine schedule": (
        origin("optimizer", "aten.add_"),
        CALM
        | {"kind": "spike", "facts": RunFacts(lr_history=((1e-3,), (9e-4,), (5e-4,), (1e-5,)))},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG504" not in codes(where, **reading)


def test_a_rate_above_the_configured_one_from_the_first_step_on_is_a_jump() -> None:
    facts = RunFacts(configured_lr=(0.01,), lr_history=((4.0,),) * 3, committed=2)
    assert codes(None, **(CALM | {"kind": "spike", "lr": (4.0,)}), facts=facts)[0] == "SG504"
