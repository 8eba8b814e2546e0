"""Operands carry the user's own expression, or the part they play; never torch's `self`."""

from __future__ import annotations

import pytest

from diagnose.diagnose_literals import number, origin, tensor
from stepguard.diagnose.source_line import name_operands
from stepguard.records import Operand

X = tensor("self", (4,), 0.0, 1.0)
Y = tensor("other", (4,), 0.0, 1.0)


def labels(op: str, line: str, *inputs: Operand, phase: str = "loss") -> list[str]:
    found = origin(phase, op, *inputs, source="train.py:7", context=(f"7 {line}",))
    return [operand.label for operand in name_operands(found).inputs]


@pytest.mark.parametrize(
    ("op", "line", "inputs", "expected"),
    [
        ("aten.div", "rate = total / count", (X, Y), ["total", "count"]),
        ("aten.div_", "rate.div_(count)", (X, Y), ["rate", "count"]),
        ("aten.log", 'loss = -torch.log(p["a"] + 1e-8)', (X,), ['p["a"] + 1e-8']),
        ("aten.mul", "y = 2 * (a + b)", (X, number("other", 2.0)), ["a + b", "the second factor"]),
        ("aten.rsub", "y = 1 - keep", (X, number("other", 1.0)), ["keep", "the first term"]),
        ("aten.reciprocal", "y = 1 / width", (X,), ["width"]),
        ("aten.bmm", "s = q @ k", (X, tensor("mat2", (4,), 0.0, 1.0)), ["q", "k"]),
    ],
)
def test_operand_is_called_what_the_line_calls_it(
    op: str, line: str, inputs: tuple[Operand, ...], expected: list[str]
) -> None:
    assert labels(op, line, *inputs) == expected


@pytest.mark.parametrize(
    ("op", "line"),
    [
        ("aten.div", "y = a / b + c / d"),
        ("aten.div", "y = F.normalize(a / b)"),
        ("aten.div", "y = a / ("),
        ("aten.div", "+ a / b"),
        ("aten.div", "y = a / 2.0"),
        ("aten.div", "y = policy.log_prob(a / b)"),
        ("aten.div", ""),
        ("aten.div", "y = a / " + "b" * 50),
    ],
    ids=["two of them", "library", "cut off", "continued", "number", "density", "no line", "long"],
)
def test_divisor_is_a_word_where_the_line_leaves_a_doubt(op: str, line: str) -> None:
    assert labels(op, line, X, Y)[1] == "the divisor"


def test_factor_is_a_word_where_a_name_may_be_a_number() -> None:
    """torch takes the tensor first: which of two names it was cannot be told."""
    said = labels("aten.mul", "y = weight * loss", X, number("other", 2.0))
    assert said == ["the first factor", "the second factor"]


def test_line_of_a_notebook_cell_is_read() -> None:
    found = origin("loss", "aten.log", X, source="cell [3], line 7", context=("7 y = p.log()",))
    assert name_operands(found).inputs[0].label == "p"


def test_operands_of_a_slope_are_words() -> None:
    assert labels("aten.div", "y = a / b", X, Y, phase="backward") == [
        "the dividend",
        "the divisor",
    ]


def test_stored_tensors_and_arguments_with_a_name_keep_it() -> None:
    stored = tensor("buffer:centre", (4,), 0.0, 1.0)
    assert labels("aten.sub", "y = out - self.centre", stored, phase="state") == [""]
    assert labels("aten._softmax", "w = attend(x)", X, number("dim", -1)) == ["the argument", ""]


def test_lists_of_tensors_are_numbered() -> None:
    listed = tensor("tensors2[3]", (4,), 0.0, 1.0), tensor("self[3]", (4,), 0.0, 1.0)
    said = labels("aten._foreach_div_", "", *listed)
    assert said == ["", "the dividend of tensor 3"]
