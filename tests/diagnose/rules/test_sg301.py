"""Rule SG301: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    HALF,
    Bad,
    at,
    at_second,
    codes,
    found,
    huge_in_bfloat16,
    origin,
    out,
    tensor,
)
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence

CALM_LOSSES = (6.0, 5.8, 5.9, 5.7, 5.8)


def test_fires_with_the_numbers() -> None:
    where = origin(
        "forward",
        "aten.add",
        at_second("self", -33.5, -61.0, -30.0, dtype=HALF),
        at_second("other", -65504.0, -65504.0, 0.0, dtype=HALF),
        output=out(dtype=HALF, neginf=1),
        evidence=Evidence(finite_in="float32"),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG301", where, **reading).evidence)
    for fragment in ("65504, the largest float16", "-33.5 + -65504", "computed in float32"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "exp(12) in float16": (
        origin(
            "forward",
            "aten.exp",
            at("self", 12.0, -1.0, 12.0, dtype=HALF),
            output=out(dtype=HALF, posinf=1),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        {},
    ),
    "sum of squares in float16": (
        origin(
            "forward",
            "aten.sum",
            tensor("self", (64,), 3e4, 4e4, dtype=HALF),
            output=out((), dtype=HALF, posinf=1),
        ),
        {},
    ),
    "gradient of a matrix product in float16": (
        origin(
            "backward",
            "aten.mm",
            tensor("self", (8, 4), -4e3, 4e3, dtype=HALF),
            tensor("mat2", (4, 8), -90.0, 90.0, dtype=HALF),
            node="MmBackward0",
            output=out((8, 8), dtype=HALF, posinf=2),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        BACKWARD,
    ),
    "static loss scale": (
        origin("backward", evidence=Evidence(scale_overflow=True)),
        BACKWARD | {"scale": 65536.0},
    ),
    "second moment in float16": (
        origin(
            "optimizer",
            "aten.addcmul_",
            tensor("self", (4,), 0.0, 0.1, dtype=HALF),
            tensor("tensor1", (4,), 0.1, 400.0, dtype=HALF),
            tensor("tensor2", (4,), 0.1, 400.0, dtype=HALF),
            tensor="opt:exp_avg_sq",
            output=out(dtype=HALF, posinf=1),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        {
            "loss": 0.3,
            "grads_finite": True,
            "kind": "nonfinite_optimizer_state",
            "bad_state": ("opt:exp_avg_sq",),
            "state_born": True,
        },
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG301"


SILENT: dict[str, Bad] = {
    "the same in float32": (
        origin("forward", "aten.mm", tensor("self", (2, 2), 1.0, 1e25)),
        {},
    ),
    "bfloat16, whose range is float32's": (
        origin(
            "forward",
            "aten.mm",
            tensor("self", (2, 2), 1.0, 1e25, dtype="bfloat16"),
            output=out(dtype="bfloat16"),
        ),
        {},
    ),
    "a division by zero in float16": (
        origin(
            "forward",
            "aten.div",
            at_second("self", 1.0, 1.0, 1.0, dtype=HALF),
            at_second("other", 0.0, 0.0, 1.0, dtype=HALF),
        ),
        {},
    ),
    "a masked row in float16": (
        origin("forward", "aten._softmax", tensor("self", (2, 2), 0.0, 1.0, neginf=2, dtype=HALF)),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG301" not in codes(where, **reading)


def test_static_scale_comes_with_the_remedy_of_a_dynamic_one() -> None:
    finding = found(
        "SG301",
        origin("backward", evidence=Evidence(scale_overflow=True)),
        **(BACKWARD | {"scale": 65536.0}),
    )
    assert finding.remedies[0].title.startswith("Use a GradScaler, which finds a scale that fits")
    assert "65536" in finding.evidence[0]


def test_calm_run_in_bfloat16_is_not_called_diverged_first() -> None:
    facts = RunFacts(losses=CALM_LOSSES, committed=5)
    assert codes(huge_in_bfloat16("float32"), facts=facts)[0] == "SG301"
