"""SG3xx and SG4xx: limits of half precision, and gradients that break where the loss is finite."""

from __future__ import annotations

import math

import pytest
import torch

from diagnose.literals import (
    BACKWARD,
    HALF,
    INF,
    NAN,
    Cases,
    at,
    checks,
    found,
    number,
    spans,
    x,
)
from stepguard.diagnose import RunFacts
from stepguard.diagnose.case import FORMATS, exp_limit, largest, plain, rounds_to_zero
from stepguard.records import Operand, Origin

ZERO = x(0.0, 0.0, 1.0)
CALM_LOSSES = (6.0, 5.8, 5.9, 5.7, 5.8)


def slope(node: str, op: str, *inputs: Operand, **known: object) -> tuple[Origin, dict]:
    """A gradient that its node made bad."""
    return at("backward", op, *inputs, node=f"{node}Backward0", **known), BACKWARD


RULES = {
    "SG301": Cases(
        fires=at(
            "forward",
            "add",
            x(-33.5, -61.0, -30.0, dtype=HALF),
            x(-65504.0, -65504.0, 0.0, dtype=HALF),
            dtype=HALF,
            neginf=1,
            finite_in="float32",
        ),
        says=("65504, the largest float16", "-33.5 + -65504", "computed in float32"),
        first={
            "sum of squares in float16": at(
                "forward", "sum", spans(3e4, 4e4, 64, dtype=HALF), dtype=HALF, posinf=1
            ),
            "gradient of a matrix product in float16": slope(
                "Mm",
                "mm",
                spans(-4e3, 4e3, 8, 4, dtype=HALF),
                spans(-90.0, 90.0, 4, 8, name="mat2", dtype=HALF),
                dtype=HALF,
                posinf=2,
            ),
            "second moment in float16": (
                at(
                    "optimizer",
                    "addcmul_",
                    spans(0.0, 0.1, dtype=HALF),
                    spans(0.1, 400.0, name="tensor1", dtype=HALF),
                    spans(0.1, 400.0, name="tensor2", dtype=HALF),
                    tensor="opt:exp_avg_sq",
                    dtype=HALF,
                    posinf=1,
                ),
                {"kind": "nonfinite_optimizer_state", "loss": 0.3, "grads_finite": True}
                | {"bad_state": ("opt:exp_avg_sq",), "state_born": True},
            ),
        },
        measured={
            "exp(12) in float16": at(
                "forward",
                "exp",
                x(12.0, -1.0, 12.0, dtype=HALF),
                dtype=HALF,
                posinf=1,
                finite_in="float32",
            ),
            "static loss scale": (
                at("backward", scale_overflow=True),
                BACKWARD | {"scale": 65536.0},
            ),
            "calm run in bfloat16": (
                at(
                    "forward",
                    "native_layer_norm",
                    spans(-3e20, 3e20, 4, 8, name="input", dtype="bfloat16"),
                    number("eps", 1e-5),
                    dtype="bfloat16",
                    nan=32,
                    half_precision=True,
                    batch_max=4.2,
                    finite_in="float32",
                ),
                {"facts": RunFacts(losses=CALM_LOSSES, committed=5)},
            ),
        },
        silent={
            "the same in float32": at("forward", "mm", spans(1.0, 1e25, 2, 2)),
            "bfloat16, whose range is float32's": at(
                "forward", "mm", spans(1.0, 1e25, 2, 2, dtype="bfloat16"), dtype="bfloat16"
            ),
            "a division by zero in float16": at(
                "forward", "div", x(1.0, 1.0, 1.0, dtype=HALF), x(0.0, 0.0, 1.0, dtype=HALF)
            ),
            "a masked row in float16": at(
                "forward", "_softmax", spans(0.0, 1.0, 2, 2, neginf=2, dtype=HALF)
            ),
        },
    ),
    "SG302": Cases(
        fires=at("forward", "rsqrt", x(0.0, 0.0, 1.0, dtype=HALF), eps_underflow=True, eps=1e-8),
        says=("eps=1e-08 is 0 in float16", "5.96e-08"),
        measured={
            "F.normalize in float16": at(
                "forward",
                "div",
                x(0.0, 0.0, 0.0, dtype=HALF),
                x(0.0, 0.0, 0.0, dtype=HALF),
                dtype=HALF,
                nan=4,
                denominator_from="aten.clamp_min",
            ),
            "log(p + 1e-8) in float16": at(
                "loss",
                "log",
                x(0.0, 0.0, 1.0, dtype=HALF),
                dtype=HALF,
                neginf=2,
                argument="zero",
                argument_from="aten.add",
                half_precision=True,
            ),
            "1 - t in bfloat16": at(
                "loss",
                "reciprocal",
                x(0.0, 0.0, 0.9, dtype="bfloat16"),
                dtype="bfloat16",
                posinf=1,
                denominator_from="aten.rsub",
            ),
            "an epsilon that vanished before a root": at(
                "forward",
                "div",
                spans(-0.4, 0.4, dtype=HALF),
                spans(0.0, 0.3, 4, 1, zeros=1, dtype=HALF),
                dtype=HALF,
                nan=4,
                denominator_from="aten.sqrt",
                eps_vanished=1e-8,
            ),
        },
        silent={
            "a zero in float32": at("forward", "rsqrt", ZERO),
            "an overflow in float16": at(
                "forward", "mm", spans(1.0, 9e3, 2, 2, dtype=HALF), dtype=HALF, posinf=1
            ),
        },
    ),
    "SG401": Cases(
        fires=slope("Sqrt", "div", x(1.0, 0.1, 1.0), x(0.0, 0.0, 2.0, index=(1,))),
        says=("sqrt(x) at x = 0", "SqrtBackward0", "at index (1,)", "1 of 4 elements zero"),
        first={
            "acos of exactly 1": slope("Acos", "rsqrt", x(0.0, 0.0, 0.7), posinf=1),
            "eigh of equal eigenvalues": slope(
                "LinalgEigh", "div_", x(0.0, 0.0, 0.0), x(0.0, 0.0, 1.0, zeros=3), nan=3
            ),
            "distance between equal points": slope("Sqrt", "div", x(1.0, 1.0, 1.0), ZERO),
            "focal loss at 0": slope(
                "Pow", "pow", x(0.0, 0.0, 0.6), number("exponent", -0.5), posinf=1
            ),
            "angle of zero": slope("Atan2", "reciprocal", ZERO),
            "slope of -p log p at 0": slope("SpecialEntr", "log", ZERO, neginf=2),
            "slope of x log y at 0": slope("Xlogy", "div", x(0.0, 0.0, 0.1), ZERO, nan=2),
        },
        measured={
            "silence against a silent reference": slope(
                "Sqrt",
                "div",
                x(0.0, 0.0, 0.1),
                ZERO,
                nan=1,
                zero_upstream_gradient=True,
                singular_at=0.0,
            ),
        },
        silent={
            "a forward root": at("forward", "sqrt", ZERO),
            "a discarded branch": slope(
                "Sqrt", "div", x(0.0, 0.0, 1.0, name="other"), unselected=True
            ),
            "a product of ordinary operands": slope("Mm", "mm", spans(0.0, 1.0, 2, 2, nan=1)),
        },
    ),
    "SG402": Cases(
        fires=slope("Exp", "mul", ZERO, spans(1.0, 2.0, posinf=1), unselected=True),
        says=("discards", "0 * inf", "1 of 4 elements +inf"),
        first={
            "where around a root of a negative number": slope(
                "Sqrt", "div", x(0.0, -0.1, 0.1), x(NAN, 0.5, 2.2, nan=1), nan=1, unselected=True
            ),
        },
        measured={
            "where around a division": (
                at("forward", "div", x(1.0, 1.0, 1.0), ZERO, posinf=1, unselected=True),
                BACKWARD,
            ),
            "where around a log": slope("Log", "div", ZERO, ZERO, nan=1, unselected=True),
            "where around an exponential": slope(
                "Exp", "mul", ZERO, x(INF, 0.1, 4.0, posinf=1), nan=1, unselected=True
            ),
        },
        silent={
            "a gradient that is not zero": slope("Sqrt", "div", x(1.0, 1.0, 1.0), ZERO),
            "a NaN loss": at("backward", "mul", ZERO, spans(0.0, 1.0, nan=1), node="MulBackward0"),
        },
    ),
    "SG403": Cases(
        fires=(
            at("forward", "reciprocal", ZERO, posinf=1, absorbed=True, absorbed_by="aten.erf"),
            BACKWARD,
        ),
        says=("1 of 4 elements +inf", "(erf)", "backward multiplies it by 0"),
        first={
            "sigmoid by hand": (
                at(
                    "forward", "exp", x(200.0, -1.0, 200.0), posinf=1, absorbed_by="aten.reciprocal"
                ),
                BACKWARD,
            ),
        },
        measured={
            "exp(log 0)": (
                at("forward", "log", ZERO, neginf=1, absorbed=True, absorbed_by="aten.exp"),
                BACKWARD,
            ),
        },
        silent={
            "an infinity that reaches the loss": (
                at("forward", "reciprocal", ZERO, posinf=1),
                {"loss": INF},
            ),
            "finite operands in backward": slope("Sqrt", "div", x(0.0, 0.0, 0.1), ZERO),
        },
    ),
}


test_fires_with_its_numbers, test_comes_first, test_stays_silent = checks(RULES)


def test_static_scale_comes_with_the_remedy_of_a_dynamic_one() -> None:
    where = at("backward", scale_overflow=True)
    finding = found("SG301", where, **BACKWARD, scale=65536.0)
    assert finding.remedies[0].title.startswith("Use a GradScaler, which finds a scale that fits")
    assert "65536" in finding.evidence[0]


@pytest.mark.parametrize("name", FORMATS)
def test_limits_of_formats_are_those_of_torch(name: str) -> None:
    info = torch.finfo(getattr(torch, name))
    assert FORMATS[name].largest == info.max
    assert FORMATS[name].smallest == pytest.approx(info.smallest_normal * info.eps, rel=1e-6)


def test_numbers_round_to_zero_and_overflow_where_they_do_in_torch() -> None:
    for value, vanishes in ((1e-8, True), (1e-7, False), (0.0, False)):
        assert rounds_to_zero(value, HALF) is vanishes
        assert (value > 0 and float(torch.tensor(value, dtype=torch.float16)) == 0.0) is vanishes
    limit = exp_limit("float32")
    assert torch.tensor(limit * 0.999).exp().isfinite()
    assert torch.tensor(limit * 1.001).exp().isinf()
    assert (plain("torch.float16"), plain("complex64")) == (HALF, "float32")
    assert (largest("int8"), exp_limit("int8")) == (math.inf, math.inf)
    assert not rounds_to_zero(1e-300, "int8"), "nothing is claimed about an unknown format"
