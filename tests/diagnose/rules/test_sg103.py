"""Rule SG103: when it fires, comes first, and stays silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diagnose.diagnose_literals import (
    DIVERGED,
    HALF,
    INF,
    Bad,
    at,
    at_second,
    codes,
    div,
    found,
    number,
    origin,
    out,
    tensor,
)
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = origin(
        "forward",
        "aten.addmm",
        tensor("mat1", (3, 2), 0.1, 1e38),
        samples=(2,),
        output=out(posinf=1),
        evidence=Evidence(batch_max=1e38, others_max=1.5),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG103", where, **reading).evidence)
    for fragment in ("1e+38", "1.5", "3.403e+38, the largest float32", "sample 2"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "fill value of 1e20 in one sample": (
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (3, 1), -4e19, 2.0),
            tensor("target", (3, 1), -1.0, 1.0),
            samples=(1,),
            output=out((), posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=1e20, sample_max=1e20, others_max=2.4),
        ),
        {"loss": INF},
    ),
    "fill value without a note": (
        origin(
            "forward",
            "aten.pow",
            tensor("self", (3, 4), 0.1, 1e25),
            number("exponent", 2),
            samples=(0,),
        ),
        {},
    ),
    "1e6 cast to float16": (
        origin(
            "forward",
            "aten._to_copy",
            tensor("self", (3, 4), 0.1, 1e6),
            output=out((3, 4), dtype=HALF, posinf=1),
            evidence=Evidence(half_precision=True, finite_in="float32", batch_max=1000000.0),
        ),
        {},
    ),
    "the cube of a state that one sample blew up": (
        origin(
            "forward",
            "aten.pow",
            at("self", -5e14, -5e14, 0.1, (4, 3)),
            number("exponent", 3.0),
            output=out((4, 3), neginf=3),
            samples=(2,),
            evidence=Evidence(
                finite_in="float64", batch_max=200.0, sample_max=200.0, others_max=0.8
            ),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG103"


SILENT: dict[str, Bad] = {
    "ordinary operands": (
        origin(
            "forward",
            "aten.mm",
            tensor("self", (2, 2), -3.0, 3.0),
            evidence=Evidence(batch_max=3.0),
        ),
        {},
    ),
    "a division by zero on an extreme batch": (
        div(
            at_second("self", 1.0, 1.0, 1e30),
            at_second("other", 0.0, 0.0, 1e30, zeros=1),
            evidence=Evidence(batch_max=1e30),
        ),
        {},
    ),
    "half precision on an ordinary batch": (
        origin(
            "forward",
            "aten.mm",
            tensor("self", (2, 2), 1.0, 9e3, dtype="float16"),
            output=out(dtype="float16", posinf=1),
            evidence=Evidence(finite_in="float32", batch_max=12.0),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG103" not in codes(where, **reading)


def test_extreme_batch_stays_the_cause_in_a_diverging_run() -> None:
    wide = tensor("input", (4, 8), -3e20, 3e20, dtype="bfloat16")
    where = origin(
        "forward",
        "aten.native_layer_norm",
        wide,
        output=out((4, 8), nan=8),
        evidence=Evidence(sample_max=3e20, others_max=2.0),
    )
    assert codes(where, facts=RunFacts(losses=DIVERGED, committed=5))[0] == "SG103"


@pytest.mark.parametrize(
    ("op", "dtype", "limit"),
    [
        ("aten.exp", "float32", "exp takes at most 88.7 in float32"),
        ("aten.exp", "float16", "exp takes at most 11.1 in float16"),
        ("aten.exp2", "float32", "exp2 takes at most 128.0 in float32"),
        ("aten.expm1", "float64", "expm1 takes at most 709.8 in float64"),
        ("aten.square", "float32", "power 2 takes at most 1.84e+19 in float32"),
    ],
)
def test_limit_is_that_of_the_operand(op: str, dtype: str, limit: str) -> None:
    where = origin(
        "forward",
        op,
        replace(tensor("self", (3, 2), 0.1, 1e30), dtype=dtype),
        output=replace(out(posinf=1), dtype=dtype),
        evidence=Evidence(batch_max=1e30, others_max=1.5),
    )
    assert limit in " | ".join(found("SG103", where).evidence)
