"""Rule SG102: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    INF,
    SCORES,
    Bad,
    at,
    at_second,
    codes,
    div,
    division,
    found,
    labels,
    nll,
    number,
    origin,
    out,
    tensor,
)
from stepguard.records import Evidence, Operand

LENGTHS = Operand(name="lengths", dtype="int64", shape=(4,), min=0.0, max=3.0, zeros=1)

COUNTS = {
    "lengths": division(0.0, 17.0, denominator_root="batch:length"),
    "integers": division(0.0, 17.0, dtype="int64"),
    "sum of a mask": division(0.0, 4.0, denominator_from="aten.sum", denominator_root="batch:mask"),
}


def test_fires_with_the_numbers() -> None:
    where = nll(SCORES, labels(-100, -100), number("ignore_index", -100), output=out((), nan=1))
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG102", where, **reading).evidence)
    for fragment in ("0 of 8 targets count", "-100", "0 / 0"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "mean of an empty selection": (
        origin(
            "loss",
            "aten.mean",
            tensor("self", (0,), None, None),
            output=out((), nan=1),
            evidence=Evidence(reduced_elements=0),
        ),
        {},
    ),
    "mse over no positive anchor": (
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (0, 4), None, None),
            tensor("target", (0, 4), None, None),
        ),
        {},
    ),
    "masked average pooling of an empty sequence": (
        origin(
            "forward",
            "aten.div",
            at("self", 0.0, -2.1, 2.0, (3, 8), zeros=8),
            tensor("other", (3, 1), 0.0, 5.0, zeros=1, index=(0, 0), value=0.0),
            module="pool",
            output=out((3, 8), nan=8),
        ),
        {},
    ),
    "class weights of 0": (
        origin(
            "loss",
            "aten.nll_loss_forward",
            tensor("self", (3, 4), -4.1, -0.4),
            Operand(name="target", dtype="int64", shape=(3,), min=0.0, max=0.0, zeros=3),
            tensor("weight", (4,), 0.0, 1.0, zeros=1),
            output=out((), nan=1),
        ),
        {},
    ),
    "division by a Python count": (
        origin(
            "loss",
            "aten.div",
            at("self", 3.0, 3.0, 3.0, ()),
            Operand(name="other", dtype="int", value=0.0),
            output=out((), posinf=1),
        ),
        {},
    ),
    "mean of a segment of length 0": (
        origin(
            "forward",
            "aten.segment_reduce",
            tensor("data", (6, 4), -1.0, 1.0),
            LENGTHS,
            output=out(nan=4),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG102"


SILENT: dict[str, Bad] = {
    "labels that count": (nll(SCORES, labels(0, 4), output=out((), posinf=1)), {}),
    "a zero norm": (
        div(
            at_second("self", 0.0, 0.0, 2.0, zeros=1),
            at_second("other", 0.0, 0.0, 2.0, zeros=1),
            evidence=Evidence(denominator_from="aten.linalg_vector_norm"),
        ),
        {},
    ),
    "a mean over elements": (origin("loss", "aten.mean", tensor("self", (4,), 1e30, 3e38)), {}),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG102" not in codes(where, **reading)


@pytest.mark.parametrize("name", COUNTS)
def test_divisor_that_counts_is_an_empty_reduction(name: str) -> None:
    assert codes(COUNTS[name], loss=INF)[0] == "SG102"
