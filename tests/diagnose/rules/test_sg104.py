"""Rule SG104: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    FROM_BATCH,
    INF,
    NO_COUNTS,
    SCORES,
    Bad,
    at,
    at_second,
    codes,
    div,
    found,
    labels,
    nll,
    origin,
    out,
    tensor,
)
from stepguard.records import Evidence, Operand


def test_fires_with_the_numbers() -> None:
    where = nll(SCORES, labels(0, 7), output=out((), nan=1))
    reading: dict[str, Any] = {}
    said = " | ".join(found("SG104", where, **reading).evidence)
    for fragment in ("a target is 7", "5 classes (0 to 4)"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "kl_div with a negative target": (
        origin(
            "loss",
            "aten.xlogy",
            at("self", -0.1, -0.1, 0.4),
            at("other", -0.1, -0.1, 0.4),
            output=out(nan=1),
            evidence=Evidence(target_out_of_domain=-0.1),
        ),
        {},
    ),
    "CTC target longer than its input": (
        origin(
            "loss",
            "aten._ctc_loss",
            tensor("log_probs", (4, 1, 5), -4.2, -0.3),
            Operand(name="input_lengths", dtype="int64", shape=(1,), min=4.0, max=4.0),
            Operand(name="target_lengths", dtype="int64", shape=(1,), min=7.0, max=7.0),
            output=out((1,), posinf=1),
            evidence=Evidence(ctc_infeasible=1),
        ),
        {"loss": INF},
    ),
    "target class masked to -inf": (
        origin(
            "loss",
            "aten.nll_loss_forward",
            tensor("self", (3, 4), -3.1, -0.4, neginf=3),
            Operand(name="target", dtype="int64", shape=(3,), min=0.0, max=2.0),
            output=out((), posinf=1),
            evidence=Evidence(valid_targets=3, zero_target_probability=True),
        ),
        {"loss": INF},
    ),
    "log of a width that the batch itself makes negative": (
        origin(
            "loss",
            "aten.log",
            at("self", -4.0, -4.0, 4.0),
            output=out(nan=1),
            evidence=FROM_BATCH | Evidence(argument_from="aten.sub"),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG104"


SILENT: dict[str, Bad] = {
    "every label ignored": (nll(SCORES, labels(-100, -100), output=out((), nan=1)), {}),
    "a logarithm of what the model computed": (
        origin("loss", "aten.log", at_second("self", 0.0, 0.0, 1.0, zeros=1)),
        {},
    ),
    "a mask that sums to 0": (
        div(
            at_second("self", 0.0, 0.0, 0.0, ()),
            at_second("other", 0.0, 0.0, 0.0, ()),
            phase="loss",
            evidence=Evidence(denominator_from="aten.sum", denominator_root="batch:mask"),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG104" not in codes(where, **reading)


def test_value_computed_from_the_batch_is_the_divisor_and_not_what_is_divided() -> None:
    finding = found("SG104", NO_COUNTS["logarithm of a length"], loss=INF)
    assert "got 0 at index (3,)" in finding.evidence[0]
