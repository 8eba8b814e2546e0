"""SG2xx, arithmetic: divisions, logarithms, exponentials, softmax, statistics, 0 * inf, roots."""

from __future__ import annotations

from typing import Any

from diagnose.literals import (
    BACKWARD,
    HALF,
    INF,
    OWN_OPTIMIZER,
    Cases,
    at,
    checks,
    codes,
    findings,
    number,
    origin,
    out,
    spans,
    x,
)
from stepguard.records import Evidence, Finding, Origin, Witness
from stepguard.records.incident import WitnessPath


def divided_by_a_norm(dtype: str) -> Origin:
    zero = x(0.0, 0.0, 0.0, shape=(), dtype=dtype)
    facts = {"zero_denominator": True, "zero_numerator": True}
    return at(
        "optimizer",
        "div",
        zero,
        zero,
        nan=1,
        denominator_from="aten.clamp_min",
        **facts,
        dtype=dtype,
    )


ROW_OF_INF = spans(-2.1, 1.5, 3, 4, neginf=4)
LOST = x(-INF, 0.0, 1.0, neginf=1)
RULES = {
    "SG201": Cases(
        fires=at(
            "forward",
            "div",
            x(0.0, -1.0, 1.0, index=(1,)),
            x(0.0, 0.0, 1.3, index=(1,)),
            denominator_from="aten.std",
        ),
        says=("divided by zero at index (1,)", "0 / 0", "1 of 4 elements zero", "aten.std"),
        first={
            "min-max scaling of a constant image": at(
                "forward",
                "div",
                x(0.0, 0.0, 255.5, shape=(2, 9)),
                x(0.0, 0.0, 255.5, shape=(2, 1)),
                nan=9,
                denominator_from="aten.sub",
            ),
            "rsqrt of a zero degree": at("forward", "rsqrt", x(0.0, 0.0, 4.0), posinf=1),
            "zero to the power -1": at(
                "forward", "pow", x(0.0, 0.0, 2.0), number("exponent", -1), posinf=1
            ),
            "layer norm with eps=0 on a constant row": at(
                "forward",
                "native_layer_norm",
                spans(1.0, 1.0, 2, 4, name="input"),
                number("eps", 0.0),
                nan=4,
            ),
            "an optimizer of one's own that divides by a norm of 0": (
                divided_by_a_norm("float32"),
                OWN_OPTIMIZER,
            ),
        },
        measured={
            "target normalised by its own std in the loss": at(
                "loss",
                "div",
                x(0.0, 0.0, 0.0),
                x(0.0, 0.0, 0.0, shape=()),
                nan=4,
                denominator_from="aten.std",
                denominator_root="batch:y",
            ),
        },
        silent={
            "a zero elsewhere in the divisor": at(
                "forward", "div", x(3e38, 1.0, 3e38), x(0.5, 0.0, 1.0, zeros=1), posinf=1
            ),
            "a zero that backward divides by": (
                at("backward", "div", x(1.0, 1.0, 1.0), x(0.0, 0.0, 1.0), node="SqrtBackward0"),
                BACKWARD,
            ),
            "a discarded branch": (
                at("forward", "div", x(1.0, 1.0, 1.0), x(0.0, 0.0, 1.0), unselected=True),
                BACKWARD,
            ),
            "a layer norm with an epsilon": at(
                "forward",
                "native_layer_norm",
                spans(0.0, 1e25, 2, 4, name="input"),
                number("eps", 1e-5),
            ),
            "zero to the power 0.5": at(
                "forward", "pow", x(0.0, 0.0, 1.0), number("exponent", 0.5)
            ),
        },
    ),
    "SG202": Cases(
        fires=at("forward", "log", x(-0.5, -0.5, 2.0, index=(1,)), source="train.py:88"),
        says=("above 0", "-0.5 at index (1,)", "train.py:88"),
        first={
            "log of a diffusion time that is 0": at(
                "forward", "log", x(0.0, 0.0, 0.9), neginf=1, argument_root="batch:t"
            ),
            "logit of 1": at("forward", "logit", x(1.0, 0.1, 1.0), posinf=1),
            "log1p of -1": at("loss", "log1p", x(-1.0, -1.0, 0.2), neginf=1),
            "gradient of a log that was gathered away": (
                at(
                    "backward",
                    "div",
                    x(0.0, -0.3, 0.0),
                    x(0.0, 0.0, 1.0),
                    node="LogBackward0",
                    nan=6,
                ),
                BACKWARD,
            ),
            "log of an underflown softmax that was gathered away": (
                at("loss", "log", x(0.0, 0.0, 1.0), neginf=1, absorbed_by="aten.gather"),
                BACKWARD | {"loss": 0.0},
            ),
            "a logarithm of 0 in an optimizer": (
                at("optimizer", "log", x(0.0, 0.0, 3.6), neginf=1),
                OWN_OPTIMIZER,
            ),
            "log of a cosine that is rounded below 0": at(
                "loss",
                "log",
                x(-4.4e-8, -4.4e-8, 0.95),
                nan=1,
                argument="negative",
                argument_root="batch:t",
                argument_from="aten.cos",
            ),
            "digamma at its pole": at("loss", "digamma", x(0.0, 0.0, 3.0), neginf=1),
        },
        measured={
            "logdet of a mirror": at("forward", "where", nan=1, chosen_by="aten._linalg_slogdet"),
        },
        silent={
            "a positive argument": at("forward", "log", x(2.0, 0.1, 2.0)),
            "log1p of -0.5": at("forward", "log1p", x(-0.5, -0.5, 2.0)),
            "a discarded branch": at("forward", "log", x(0.0, 0.0, 1.0), unselected=True),
        },
    ),
    "SG203": Cases(
        fires=at("forward", "exp", x(104.3, -3.0, 104.3), posinf=1),
        says=("exp(104.3)", "88.72", "float32"),
        first={
            "log-variance of 100": at(
                "forward",
                "exp",
                x(100.0, -3.0, 100.0),
                posinf=1,
                finite_in="float64",
                batch_max=3.1,
            ),
            "a high power": at(
                "forward",
                "pow",
                x(3e3, 0.1, 3e3),
                number("exponent", 400.0),
                posinf=1,
                finite_in="float64",
            ),
            "exp in a backward that somebody wrote": (
                at("backward", "exp", x(91.4, 0.7, 91.4), posinf=2, node="MishFnBackward"),
                BACKWARD,
            ),
        },
        measured={
            "Bessel function of a large concentration": at(
                "loss", "i0", x(400.0, 0.7, 400.0), posinf=1, finite_in="float64"
            ),
        },
        silent={
            "an exponent within the limit": at("forward", "exp", x(80.0, -3.0, 80.0)),
            "an infinite exponent": at("forward", "exp", spans(0.0, 1.0, posinf=1), posinf=1),
            "a square": at("forward", "pow", x(1e25, 1.0, 1e25), number("exponent", 2)),
        },
    ),
    "SG204": Cases(
        fires=at(
            "forward",
            "_softmax",
            spans(-1.0, 1.0, 2, 4, 6, neginf=12),
            nan=12,
            shape=(2, 4, 6),
            masked_rows=2,
            rows=8,
        ),
        says=("2 rows of 8", "12 of 48 elements -inf"),
        first={
            "logsumexp over a masked row": (
                at(
                    "backward",
                    "sub",
                    ROW_OF_INF,
                    spans(1.0, 1.9, 3, 1, neginf=1),
                    node="LogsumexpBackward0",
                    nan=4,
                ),
                BACKWARD,
            ),
            "hand-written softmax over a masked row": at(
                "forward", "sub", ROW_OF_INF, spans(0.1, 1.5, 3, 1, neginf=1), nan=4
            ),
            "attention kernel with a masked row": at(
                "forward",
                "_scaled_dot_product_flash_attention_for_cpu",
                spans(-1.0, 1.0, 1, 1, 3, 4, name="query"),
                spans(0.0, 0.0, 1, 1, 3, 3, name="attn_mask", neginf=3),
                nan=4,
                masked_rows=1,
            ),
            "log-sum of two terms that are both -inf": (
                at(
                    "backward",
                    "sub",
                    spans(-2.4, -1.3, 4, 3, neginf=2),
                    spans(-2.4, -1.3, 4, 3, neginf=5),
                    node="LogaddexpBackward0",
                    nan=1,
                    posinf=4,
                ),
                BACKWARD,
            ),
        },
        silent={
            "a causal mask with one free key a row": at(
                "forward", "_softmax", spans(-1.0, 1.0, 4, 4, neginf=2, posinf=1), nan=4
            ),
            "finite scores": at("forward", "_softmax", spans(-1.0, 1.0, 4, 4)),
            "a difference of two vectors of scores": at(
                "loss", "sub", spans(0.0, 1.0, neginf=1), spans(0.0, 1.0, neginf=1), nan=1
            ),
        },
    ),
    "SG205": Cases(
        fires=at("loss", "std", spans(0.7, 0.7, 1), number("correction", 1), nan=1),
        says=("1 element", "correction=1", "0.7"),
        first={
            "advantages of a group of one": at(
                "loss", "std", spans(0.7, 0.7, 1), nan=1, reduced_elements=1
            ),
            "variance over a batch of one": at(
                "forward", "var_mean", spans(-2.0, 1.5, 1, 4), nan=4
            ),
        },
        silent={
            "squares that overflow": at("forward", "var", spans(-1e25, 1e25, 8, 64), nan=8),
            "an infinite element": at("forward", "std", spans(0.0, 1.0, 1, posinf=1), nan=1),
        },
    ),
    "SG206": Cases(
        fires=at("loss", "mul", LOST, x(0.0, 0.0, 1.0, zeros=2), nan=1),
        says=("0 * inf is NaN", "1 of 4 elements -inf", "2 of 4 elements zero"),
        first={
            "loss of padding multiplied by its mask": at(
                "loss", "mul", LOST, x(0.0, 0.0, 1.0), nan=1, intended_inf=True
            ),
            "difference of two masked scores": at("loss", "sub", LOST, LOST, nan=1),
        },
        silent={
            "finite factors": at(
                "forward", "mul", x(1e30, 1.0, 1e30), x(1e30, 1.0, 1e30), posinf=1
            ),
            "a NaN that came in": at("forward", "mul", spans(0.0, 1.0, nan=1, posinf=1), nan=1),
            "a masked row": at("forward", "_softmax", spans(0.0, 1.0, 2, 3, neginf=3), nan=3),
        },
    ),
    "SG207": Cases(
        fires=at("forward", "sqrt", x(-3e-8, -3e-8, 2.0), nan=1),
        says=("square root", "-3e-08", "rounding error below 0"),
        first={
            "gamma correction of a negative pixel": at(
                "forward", "pow", x(-0.1, -0.1, 1.0), number("exponent", 0.45), nan=1
            ),
            "acos of 1.0000001": at("loss", "acos", x(1.0000001, 0.2, 1.0000001), nan=1),
            "acosh of 0.9": at("loss", "acosh", x(0.9, 0.9, 2.0), nan=1),
            "a root of a rounded eigenvalue in an optimizer": (
                at("optimizer", "pow", x(-2.6e-7, -2.6e-7, 3.6), number("exponent", -0.25), nan=3),
                OWN_OPTIMIZER,
            ),
        },
        silent={
            "a whole power of a negative number": at(
                "forward", "pow", x(-1e30, -1e30, 1.0), number("exponent", 3), neginf=1
            ),
            "acos within its range": at("forward", "acos", x(1.0, -1.0, 1.0)),
            "a root of 0": at("forward", "sqrt", x(0.0, 0.0, 1.0)),
        },
    ),
}


test_fires_with_its_numbers, test_comes_first, test_stays_silent = checks(RULES)


def test_epsilon_of_an_optimizer_that_is_0_in_float16_comes_before_the_division() -> None:
    assert codes(divided_by_a_norm(HALF), **OWN_OPTIMIZER)[0] == "SG502"


def test_sg208_custom_function_named_like_an_operation_is_judged_by_its_boundary() -> None:
    where = origin(
        "forward",
        "log",
        spans(-1.0, 0.0, name="x"),
        output=out(nan=1),
        node="SqrtBackward",
        method="replay",
        evidence=Evidence(opaque="function"),
    )
    (only,) = findings(where)
    assert (only.code, only.certainty) == ("SG208", "likely")
    assert "float32 [4] from -1 to 0" in only.evidence[1]


def test_sg208_fused_attention_that_nothing_else_explains_is_an_opaque_kernel() -> None:
    q = spans(-3.0, 3.0, 1, 2, 4, 8, name="query")
    (only,) = findings(
        at("forward", "_scaled_dot_product_flash_attention", q, nan=1, method="replay")
    )
    assert (only.code, only.certainty) == ("SG208", "possible")


def judged(*witnesses: Witness) -> list[Finding]:
    where = origin(
        "forward",
        "Norm",
        spans(-1.0, 1.0, name="x"),
        output=out(nan=1),
        method="replay",
        evidence=Evidence(opaque="function", witnesses=witnesses),
    )
    return list(findings(where))


def witness(path: WitnessPath, **more: Any) -> Witness:
    return Witness(path=path, name=f"path {path}", **more)


def test_sg209_is_certain_only_by_a_path_that_shares_no_code_with_the_kernel() -> None:
    first = judged(witness("math", finite=True, value=0.31, agrees=True))[0]
    assert (first.code, first.certainty) == ("SG209", "certain")
    assert "path math gives 0.31 on the same inputs" in first.evidence[0]
    same = judged(witness("wider", finite=True, value=0.31, agrees=True))
    assert [(one.code, one.certainty) for one in same] == [("SG208", "likely"), ("SG209", "likely")]


def test_sg209_needs_a_path_that_agrees_where_the_kernel_is_right() -> None:
    (only,) = judged(witness("reference", finite=True, value=0.31, agrees=False))
    assert only.code == "SG208"
    unknown = judged(witness("reference", finite=True, value=0.31))
    assert {one.code: one.certainty for one in unknown}["SG209"] == "likely"


def test_sg208_says_that_the_kernel_is_cleared_or_that_nothing_was_tried() -> None:
    (cleared,) = judged(witness("math", finite=False))
    assert cleared.certainty == "possible" and "the kernel is cleared" in cleared.evidence[3]
    (untried,) = judged(witness("reference", why_not="no other way is known"))
    assert untried.certainty == "likely"
    assert untried.evidence[3] == "no other path was tried: no other way is known"
