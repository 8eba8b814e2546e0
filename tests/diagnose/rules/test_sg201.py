"""Rule SG201: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    INF,
    NO_COUNTS,
    OWN_OPTIMIZER,
    Bad,
    at,
    at_second,
    codes,
    div,
    divided_by_a_norm,
    found,
    number,
    origin,
    out,
    tensor,
)
from stepguard.records import Evidence


def test_fires_with_the_numbers() -> None:
    where = div(
        at_second("self", 0.0, -1.0, 1.0),
        at_second("other", 0.0, 0.0, 1.3, zeros=1),
        evidence=Evidence(denominator_from="aten.std"),
    )
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG201", where, **reading).evidence)
    for fragment in ("divided by zero at index (1,)", "0 / 0", "1 of 4 elements zero", "aten.std"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "target normalised by its own std in the loss": (
        origin(
            "loss",
            "aten.div",
            at("self", 0.0, 0.0, 0.0, (4,), zeros=4),
            at("other", 0.0, 0.0, 0.0, (), zeros=1),
            output=out((4,), nan=4),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.std",
                denominator_root="batch:y",
                zero_numerator=True,
            ),
        ),
        {},
    ),
    "min-max scaling of a constant image": (
        origin(
            "forward",
            "aten.div",
            at("self", 0.0, 0.0, 255.0, (2, 9), zeros=9),
            at("other", 0.0, 0.0, 255.0, (2, 1), zeros=1),
            output=out((2, 9), nan=9),
            evidence=Evidence(
                zero_denominator=True, denominator_from="aten.sub", zero_numerator=True
            ),
        ),
        {},
    ),
    "rsqrt of a zero degree": (
        origin("forward", "aten.rsqrt", at("self", 0.0, 0.0, 4.0, zeros=1), output=out(posinf=1)),
        {},
    ),
    "zero to the power -1": (
        origin(
            "forward",
            "aten.pow",
            at("self", 0.0, 0.0, 2.0, zeros=1),
            number("exponent", -1),
            output=out(posinf=1),
        ),
        {},
    ),
    "layer norm with eps=0 on a constant row": (
        origin(
            "forward",
            "aten.native_layer_norm",
            tensor("input", (2, 4), 1.0, 1.0),
            number("eps", 0.0),
            output=out(nan=4),
        ),
        {},
    ),
    "an optimizer of one's own that divides by a norm of 0": (
        divided_by_a_norm("float32"),
        OWN_OPTIMIZER,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG201"


SILENT: dict[str, Bad] = {
    "a zero elsewhere in the divisor": (
        div(
            at_second("self", 3e38, 1.0, 3e38),
            at_second("other", 0.5, 0.0, 1.0, zeros=1),
            output=out(posinf=1),
        ),
        {},
    ),
    "a zero that backward divides by": (
        div(
            at_second("self", 1.0, 1.0, 1.0),
            at_second("other", 0.0, 0.0, 1.0),
            phase="backward",
            node="SqrtBackward0",
        ),
        BACKWARD,
    ),
    "a discarded branch": (
        div(
            at_second("self", 1.0, 1.0, 1.0),
            at_second("other", 0.0, 0.0, 1.0),
            evidence=Evidence(unselected=True),
        ),
        BACKWARD,
    ),
    "a layer norm with an epsilon": (
        origin(
            "forward",
            "aten.native_layer_norm",
            tensor("input", (2, 4), 0.0, 1e25),
            number("eps", 1e-5),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG201" not in codes(where, **reading)


@pytest.mark.parametrize("name", NO_COUNTS)
def test_divisor_that_is_no_count_is_a_division_by_zero(name: str) -> None:
    assert codes(NO_COUNTS[name], loss=INF)[0] == "SG201"
