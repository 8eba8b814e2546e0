"""SG1xx, data: bad inputs, nothing to average, extreme values, values outside a domain."""

from __future__ import annotations

import pytest

from diagnose.literals import (
    DIVERGED,
    HALF,
    INF,
    NAN,
    Cases,
    at,
    checks,
    codes,
    found,
    number,
    origin,
    spans,
    whole,
    x,
)
from stepguard.diagnose import RunFacts
from stepguard.records import Operand, Origin

SCORES = spans(-3.0, -0.1, 8, 5)
ALL_IGNORED = at("loss", "nll_loss_forward", SCORES, whole("target", -100, -100), nan=1)
BATCH_X = {"kind": "nonfinite_input", "bad_inputs": ("batch:x",)}


def divided(low: float, high: float, *, dtype: str = "float32", **evidence: str | bool) -> Origin:
    """0.3 by an element 0 of this range."""
    divisor = x(0.0, low, high, index=(3,), dtype=dtype)
    dividend = x(0.3, 0.1, 0.5, index=(3,))
    return at("loss", "div", dividend, divisor, zero_denominator=True, posinf=1, **evidence)


RULES = {
    "SG101": Cases(
        fires=(
            origin(
                "input",
                "aten.addmm",
                x(NAN, -1.0, 1.0, shape=(5, 4), name="x", nan=1, index=(3, 1)),
                tensor="batch:x",
                samples=(3,),
            ),
            BATCH_X,
        ),
        says=("batch:x", "1 of 20 elements NaN", "(3, 1)", "sample 3"),
        first={
            "one bad sample": (at("input", "addmm", tensor="batch:x", samples=(4,)), BATCH_X),
            "no origin": (None, BATCH_X | {"facts": RunFacts()}),
        },
        silent={
            "targets that are NaN on purpose and masked": (
                at("forward", "log", x(0.0, 0.0, 1.0)),
                {"bad_inputs": ("batch:y",)},
            ),
            "a finite operand from the batch": at(
                "loss", "log", x(-1.0, -1.0, 1.0), tensor="batch:box"
            ),
        },
    ),
    "SG102": Cases(
        fires=at(
            "loss",
            "nll_loss_forward",
            SCORES,
            whole("target", -100, -100),
            number("ignore_index", -100),
            nan=1,
        ),
        says=("0 of 8 targets count", "-100", "0 / 0"),
        first={
            "mean of an empty selection": at(
                "loss", "mean", spans(None, None, 0), nan=1, reduced_elements=0
            ),
            "mse over no positive anchor": at(
                "loss", "mse_loss", spans(None, None, 0, 4), spans(None, None, 0, 4, name="target")
            ),
            "masked average pooling of an empty sequence": at(
                "forward",
                "div",
                x(0.0, -2.1, 2.0, shape=(3, 8)),
                x(0.0, 0.0, 5.0, shape=(3, 1)),
                nan=8,
            ),
            "class weights of 0": at(
                "loss",
                "nll_loss_forward",
                spans(-4.1, -0.4, 3, 4),
                whole("target", 0.0, 0.0, zeros=8),
                spans(0.0, 1.0, name="weight", zeros=1),
                nan=1,
            ),
            "division by a Python count": at(
                "loss",
                "div",
                x(3.0, 3.0, 3.0, shape=()),
                Operand(name="other", dtype="int", value=0.0),
                posinf=1,
            ),
            "mean of a segment of length 0": at(
                "forward",
                "segment_reduce",
                spans(-1.0, 1.0, 6, 4, name="data"),
                whole("lengths", 0.0, 3.0, zeros=1),
                nan=4,
            ),
            "division by integers": (divided(0.0, 17.0, dtype="int64"), {"loss": INF}),
        },
        measured={
            "division by lengths": (
                divided(0.0, 17.0, denominator_root="batch:length"),
                {"loss": INF},
            ),
            "division by the sum of a mask": (
                divided(0.0, 4.0, denominator_from="aten.sum", denominator_root="batch:mask"),
                {"loss": INF},
            ),
        },
        silent={
            "labels that count": at(
                "loss", "nll_loss_forward", SCORES, whole("target", 0, 4), posinf=1
            ),
            "a zero norm": at(
                "forward",
                "div",
                x(0.0, 0.0, 2.0),
                x(0.0, 0.0, 2.0),
                denominator_from="aten.linalg_vector_norm",
            ),
            "a mean over elements": at("loss", "mean", spans(1e30, 3e38)),
        },
    ),
    "SG103": Cases(
        fires=at(
            "forward",
            "addmm",
            spans(0.1, 1e38, 3, 2, name="mat1"),
            samples=(2,),
            posinf=1,
            batch_max=1e38,
            others_max=1.5,
        ),
        says=("1e+38", "1.5", "3.403e+38, the largest float32", "sample 2"),
        first={
            "fill value of 1e25": at(
                "forward", "pow", spans(0.1, 1e25, 3, 4), number("exponent", 2), samples=(0,)
            ),
        },
        measured={
            "fill value of 1e20 in one sample": (
                at(
                    "loss",
                    "mse_loss",
                    spans(-4e19, 2.0, 3, 1),
                    spans(-1.0, 1.0, 3, 1, name="target"),
                    samples=(1,),
                    posinf=1,
                    finite_in="float64",
                    batch_max=1e20,
                    sample_max=1e20,
                    others_max=2.4,
                ),
                {"loss": INF},
            ),
            "1e6 cast to float16": at(
                "forward",
                "_to_copy",
                spans(0.1, 1e6, 3, 4),
                dtype=HALF,
                posinf=1,
                half_precision=True,
                finite_in="float32",
                batch_max=1e6,
            ),
            "the cube of a state that one sample blew up": at(
                "forward",
                "pow",
                x(-5e14, -5e14, 0.1),
                number("exponent", 3.0),
                neginf=3,
                samples=(2,),
                finite_in="float64",
                batch_max=200.0,
                sample_max=200.0,
                others_max=0.8,
            ),
            "an extreme sample in a diverging run": (
                at(
                    "forward",
                    "native_layer_norm",
                    spans(-3e20, 3e20, 4, 8, name="input", dtype="bfloat16"),
                    nan=8,
                    sample_max=3e20,
                    others_max=2.0,
                ),
                {"facts": RunFacts(losses=DIVERGED, committed=5)},
            ),
        },
        silent={
            "ordinary operands": at("forward", "mm", spans(-3.0, 3.0, 2, 2), batch_max=3.0),
            "a division by zero on an extreme batch": at(
                "forward", "div", x(1.0, 1.0, 1e30), x(0.0, 0.0, 1e30), batch_max=1e30
            ),
            "half precision on an ordinary batch": at(
                "forward",
                "mm",
                spans(1.0, 9e3, 2, 2, dtype=HALF),
                dtype=HALF,
                posinf=1,
                finite_in="float32",
                batch_max=12.0,
            ),
        },
    ),
    "SG104": Cases(
        fires=at("loss", "nll_loss_forward", SCORES, whole("target", 0, 7), nan=1),
        says=("a target is 7", "5 classes (0 to 4)"),
        first={
            "target class masked to -inf": (
                at(
                    "loss",
                    "nll_loss_forward",
                    spans(-3.1, -0.4, 3, 4, neginf=3),
                    whole("target", 0.0, 2.0),
                    posinf=1,
                    valid_targets=3,
                    zero_target_probability=True,
                ),
                {"loss": INF},
            ),
        },
        measured={
            "kl_div with a negative target": at(
                "loss",
                "xlogy",
                x(-0.1, -0.1, 0.4),
                x(-0.1, -0.1, 0.4),
                nan=1,
                target_out_of_domain=-0.1,
            ),
            "CTC target longer than its input": (
                at(
                    "loss",
                    "_ctc_loss",
                    spans(-4.2, -0.3, 4, 1, 5, name="log_probs"),
                    whole("input_lengths", 4.0, 4.0),
                    whole("target_lengths", 7.0, 7.0),
                    posinf=1,
                    ctc_infeasible=1,
                ),
                {"loss": INF},
            ),
            "log of a width that the batch itself makes negative": at(
                "loss",
                "log",
                x(-4.0, -4.0, 4.0),
                nan=1,
                argument="negative",
                argument_root="batch:t",
                argument_from="aten.sub",
            ),
        },
        silent={
            "every label ignored": ALL_IGNORED,
            "a logarithm of what the model computed": at("loss", "log", x(0.0, 0.0, 1.0)),
            "a mask that sums to 0": at(
                "loss",
                "div",
                x(0.0, 0.0, 0.0, shape=()),
                x(0.0, 0.0, 0.0, shape=()),
                denominator_from="aten.sum",
                denominator_root="batch:mask",
            ),
        },
    ),
}
NO_COUNTS = {
    "logarithm of a length": divided(
        0.0, 2.83, denominator_from="aten.log", denominator_root="batch:length"
    ),
    "logarithm of lengths that are all 1": divided(
        0.0, 0.0, denominator_from="aten.log", denominator_root="batch:length"
    ),
    "weights between 0 and 3": divided(
        0.0, 3.0, denominator_root="batch:mask", denominator_fractional=True
    ),
    "whole numbers below 0": divided(-2.0, 3.0, denominator_root="batch:label"),
    "integers below 0": divided(-2.0, 3.0, dtype="int64"),
}


test_fires_with_its_numbers, test_comes_first, test_stays_silent = checks(RULES)


@pytest.mark.parametrize("name", NO_COUNTS)
def test_divisor_that_is_no_count_is_a_division_by_zero(name: str) -> None:
    assert codes(NO_COUNTS[name], loss=INF)[0] == "SG201"


def test_value_computed_from_the_batch_is_the_divisor_and_not_what_is_divided() -> None:
    finding = found("SG104", NO_COUNTS["logarithm of a length"], loss=INF)
    assert "got 0 at index (3,)" in finding.evidence[0]


@pytest.mark.parametrize(
    ("op", "dtype", "limit"),
    [
        ("exp", "float32", "exp takes at most 88.7 in float32"),
        ("exp", "float16", "exp takes at most 11.1 in float16"),
        ("exp2", "float32", "exp2 takes at most 128.0 in float32"),
        ("expm1", "float64", "expm1 takes at most 709.8 in float64"),
        ("square", "float32", "power 2 takes at most 1.84e+19 in float32"),
    ],
)
def test_limit_is_that_of_the_operand(op: str, dtype: str, limit: str) -> None:
    large = spans(0.1, 1e30, 3, 2, dtype=dtype)
    where = at("forward", op, large, dtype=dtype, posinf=1, batch_max=1e30, others_max=1.5)
    assert limit in " | ".join(found("SG103", where).evidence)
