"""Rules SG1xx and SG2xx one by one: the evidence has the numbers, and near misses stay silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, INF, NAN, codes, found, number, origin, out, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Operand, Origin

Bad = tuple[Origin | None, dict[str, Any]]


def at(
    name: str, value: float, low: float, high: float, shape: tuple[int, ...] = (4,), **more: Any
) -> Operand:
    """An operand whose element at the bad position is known."""
    return tensor(name, shape, low, high, index=(1,) * len(shape), value=value, **more)


def div(above: Operand, below: Operand, **more: Any) -> Origin:
    return origin(more.pop("phase", "forward"), "aten.div", above, below, **more)


def nll(*inputs: Operand, **more: Any) -> Origin:
    return origin("loss", "aten.nll_loss_forward", *inputs, **more)


SCORES = tensor("self", (8, 5), -3.0, -0.1)


def labels(low: float, high: float) -> Operand:
    return Operand(name="target", dtype="int64", shape=(8,), min=low, max=high)


FIRES: dict[str, tuple[Bad, tuple[str, ...]]] = {
    "SG101": (
        (
            origin(
                "input",
                "aten.addmm",
                tensor("x", (5, 4), -1.0, 1.0, nan=1, index=(3, 1), value=NAN),
                tensor="batch:x",
                samples=(3,),
            ),
            {"bad_inputs": ("batch:x",)},
        ),
        ("batch:x", "1 of 20 elements NaN", "(3, 1)", "sample 3"),
    ),
    "SG102": (
        (nll(SCORES, labels(-100, -100), number("ignore_index", -100), output=out((), nan=1)), {}),
        ("0 of 8 targets count", "-100", "0 / 0"),
    ),
    "SG103": (
        (
            origin(
                "forward",
                "aten.addmm",
                tensor("mat1", (3, 2), 0.1, 1e38),
                samples=(2,),
                output=out(posinf=1),
                evidence=Evidence(batch_max=1e38, others_max=1.5),
            ),
            {},
        ),
        ("1e+38", "1.5", "3.40282e+38, the largest float32", "sample 2"),
    ),
    "SG104": (
        (nll(SCORES, labels(0, 7), output=out((), nan=1)), {}),
        ("a target is 7", "5 classes (0 to 4)"),
    ),
    "SG201": (
        (
            div(
                at("self", 0.0, -1.0, 1.0),
                at("other", 0.0, 0.0, 1.3, zeros=1),
                evidence=Evidence(denominator_from="aten.std"),
            ),
            {},
        ),
        ("divided by zero at index (1,)", "0 / 0", "1 of 4 elements zero", "aten.std"),
    ),
    "SG202": (
        (origin("forward", "aten.log", at("self", -0.5, -0.5, 2.0), source="train.py:88"), {}),
        ("above 0", "-0.5 at index (1,)", "train.py:88"),
    ),
    "SG203": (
        (origin("forward", "aten.exp", at("self", 104.3, -3.0, 104.3), output=out(posinf=1)), {}),
        ("exp(104.3)", "88.72", "float32"),
    ),
    "SG204": (
        (
            origin(
                "forward",
                "aten._softmax",
                tensor("self", (2, 4, 6), -1.0, 1.0, neginf=12),
                output=out((2, 4, 6), nan=12),
                evidence=Evidence(masked_rows=2, rows=8),
            ),
            {},
        ),
        ("2 rows of 8", "12 of 48 elements -inf"),
    ),
    "SG205": (
        (
            origin(
                "loss",
                "aten.std",
                tensor("self", (1,), 0.7, 0.7),
                number("correction", 1),
                output=out((), nan=1),
            ),
            {},
        ),
        ("1 element", "correction=1", "0.7"),
    ),
    "SG206": (
        (
            origin(
                "loss",
                "aten.mul",
                tensor("self", (4,), 0.0, 1.0, neginf=1, index=(1,), value=-INF),
                tensor("other", (4,), 0.0, 1.0, zeros=2, index=(1,), value=0.0),
                output=out(nan=1),
            ),
            {},
        ),
        ("0 * inf is NaN", "1 of 4 elements -inf", "2 of 4 elements zero"),
    ),
    "SG207": (
        (origin("forward", "aten.sqrt", at("self", -3e-8, -3e-8, 2.0), output=out(nan=1)), {}),
        ("square root", "-3e-08", "rounding error below 0"),
    ),
}

SILENT: dict[str, dict[str, Bad]] = {
    "SG101": {
        "targets that are NaN on purpose and masked": (
            origin("forward", "aten.log", at("self", 0.0, 0.0, 1.0, zeros=1)),
            {"bad_inputs": ("batch:y",)},
        ),
        "a finite operand that comes from the batch": (
            origin("loss", "aten.log", at("self", -1.0, -1.0, 1.0), tensor="batch:box"),
            {},
        ),
    },
    "SG102": {
        "labels that count": (nll(SCORES, labels(0, 4), output=out((), posinf=1)), {}),
        "a zero norm": (
            div(
                at("self", 0.0, 0.0, 2.0, zeros=1),
                at("other", 0.0, 0.0, 2.0, zeros=1),
                evidence=Evidence(denominator_from="aten.linalg_vector_norm"),
            ),
            {},
        ),
        "a mean over elements": (origin("loss", "aten.mean", tensor("self", (4,), 1e30, 3e38)), {}),
    },
    "SG103": {
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
                at("self", 1.0, 1.0, 1e30),
                at("other", 0.0, 0.0, 1e30, zeros=1),
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
    },
    "SG104": {
        "every label ignored": (nll(SCORES, labels(-100, -100), output=out((), nan=1)), {}),
        "a logarithm of what the model computed": (
            origin("loss", "aten.log", at("self", 0.0, 0.0, 1.0, zeros=1)),
            {},
        ),
        "a mask that sums to 0": (
            div(
                at("self", 0.0, 0.0, 0.0, ()),
                at("other", 0.0, 0.0, 0.0, ()),
                phase="loss",
                evidence=Evidence(denominator_from="aten.sum", denominator_root="batch:mask"),
            ),
            {},
        ),
    },
    "SG201": {
        "a zero elsewhere in the divisor": (
            div(
                at("self", 3e38, 1.0, 3e38),
                at("other", 0.5, 0.0, 1.0, zeros=1),
                output=out(posinf=1),
            ),
            {},
        ),
        "a zero that backward divides by": (
            div(
                at("self", 1.0, 1.0, 1.0),
                at("other", 0.0, 0.0, 1.0),
                phase="backward",
                node="SqrtBackward0",
            ),
            BACKWARD,
        ),
        "a discarded branch": (
            div(
                at("self", 1.0, 1.0, 1.0),
                at("other", 0.0, 0.0, 1.0),
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
    },
    "SG202": {
        "a positive argument": (origin("forward", "aten.log", at("self", 2.0, 0.1, 2.0)), {}),
        "log1p of -0.5": (origin("forward", "aten.log1p", at("self", -0.5, -0.5, 2.0)), {}),
        "a discarded branch": (
            origin(
                "forward", "aten.log", at("self", 0.0, 0.0, 1.0), evidence=Evidence(unselected=True)
            ),
            {},
        ),
    },
    "SG203": {
        "an exponent within the limit": (
            origin("forward", "aten.exp", at("self", 80.0, -3.0, 80.0)),
            {},
        ),
        "an infinite exponent": (
            origin(
                "forward",
                "aten.exp",
                tensor("self", (4,), 0.0, 1.0, posinf=1),
                output=out(posinf=1),
            ),
            {},
        ),
        "a square": (
            origin("forward", "aten.pow", at("self", 1e25, 1.0, 1e25), number("exponent", 2)),
            {},
        ),
    },
    "SG204": {
        "a causal mask with one free key a row": (
            origin(
                "forward",
                "aten._softmax",
                tensor("self", (4, 4), -1.0, 1.0, neginf=2, posinf=1),
                output=out(nan=4),
            ),
            {},
        ),
        "finite scores": (
            origin("forward", "aten._softmax", tensor("self", (4, 4), -1.0, 1.0)),
            {},
        ),
        "a difference of two vectors of scores": (
            origin(
                "loss",
                "aten.sub",
                tensor("self", (4,), 0.0, 1.0, neginf=1),
                tensor("other", (4,), 0.0, 1.0, neginf=1),
                output=out(nan=1),
            ),
            {},
        ),
    },
    "SG205": {
        "a statistic whose squares overflow": (
            origin(
                "forward", "aten.var", tensor("self", (8, 64), -1e25, 1e25), output=out((8,), nan=8)
            ),
            {},
        ),
        "an infinite element": (
            origin(
                "forward",
                "aten.std",
                tensor("self", (1,), 0.0, 1.0, posinf=1),
                output=out((), nan=1),
            ),
            {},
        ),
    },
    "SG206": {
        "finite factors": (
            origin(
                "forward",
                "aten.mul",
                at("self", 1e30, 1.0, 1e30),
                at("other", 1e30, 1.0, 1e30),
                output=out(posinf=1),
            ),
            {},
        ),
        "a NaN that came in": (
            origin(
                "forward",
                "aten.mul",
                tensor("self", (4,), 0.0, 1.0, nan=1, posinf=1),
                output=out(nan=1),
            ),
            {},
        ),
        "a softmax over a masked row": (
            origin(
                "forward",
                "aten._softmax",
                tensor("self", (2, 3), 0.0, 1.0, neginf=3),
                output=out(nan=3),
            ),
            {},
        ),
    },
    "SG207": {
        "a whole power of a negative number": (
            origin(
                "forward",
                "aten.pow",
                at("self", -1e30, -1e30, 1.0),
                number("exponent", 3),
                output=out(neginf=1),
            ),
            {},
        ),
        "acos within its range": (origin("forward", "aten.acos", at("self", 1.0, -1.0, 1.0)), {}),
        "a root of 0": (origin("forward", "aten.sqrt", at("self", 0.0, 0.0, 1.0, zeros=1)), {}),
    },
}


@pytest.mark.parametrize("code", FIRES)
def test_fires_with_the_numbers(code: str) -> None:
    (where, reading), fragments = FIRES[code]
    finding = found(code, where, **reading)
    said = " | ".join(finding.evidence)
    assert [fragment for fragment in fragments if fragment not in said] == [], said


@pytest.mark.parametrize(
    ("code", "name"), [(code, name) for code, misses in SILENT.items() for name in misses]
)
def test_stays_silent_on(code: str, name: str) -> None:
    where, reading = SILENT[code][name]
    assert code not in codes(where, **reading)


def test_bad_inputs_without_an_origin_are_still_named() -> None:
    assert codes(None, kind="nonfinite_input", bad_inputs=("batch:x",), facts=RunFacts()) == [
        "SG101"
    ]
