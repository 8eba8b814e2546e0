"""Which operand left the domain of its operation."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import at, number, origin, tensor
from stepguard.diagnose import Case
from stepguard.diagnose.rule import (
    counts_nothing,
    log_argument,
    negative_root,
    overflow,
    singular_inputs,
    zero_divisor,
)
from stepguard.records import Operand, Reading, Verdict


def case(op: str, *inputs: Operand, **more: Any) -> Case:
    where = origin(more.pop("phase", "forward"), f"aten.{op}", *inputs, **more)
    verdict = Verdict(kind="nonfinite_loss", severity="incident")
    return Case(reading=Reading(step=1), verdict=verdict, origin=where)


ONE = at("self", 1.0, 0.5, 1.0)
ZERO = at("other", 0.0, 0.0, 1.0, zeros=1)


def test_the_divisor_is_found_where_it_is_zero() -> None:
    assert zero_divisor(case("div", ONE, ZERO)) == ZERO
    assert zero_divisor(case("div", ONE, at("other", 1.0, 0.0, 1.0, zeros=1))) is None


def test_a_negative_power_of_zero_divides() -> None:
    base = at("self", 0.0, 0.0, 1.0)
    assert zero_divisor(case("pow", base, number("exponent", -0.5))) == base
    assert zero_divisor(case("pow", base, number("exponent", 0.5))) is None


@pytest.mark.parametrize(
    ("op", "value", "beyond"),
    [("log", 0.0, True), ("log", 0.1, False), ("log1p", -1.0, True), ("logit", 1.0, True)],
)
def test_the_argument_of_a_logarithm_is_beyond_its_pole(
    op: str, value: float, beyond: bool
) -> None:
    assert (log_argument(case(op, at("self", value, -2.0, 2.0))) is not None) is beyond


@pytest.mark.parametrize(
    ("op", "value", "asked"),
    [
        ("sqrt", -0.1, "square root"),
        ("acos", 1.1, "acos, which is real on [-1, 1] only"),
        ("acosh", 0.9, "acosh, which is real from 1 on"),
    ],
)
def test_a_missing_root_says_what_was_asked(op: str, value: float, asked: str) -> None:
    found = negative_root(case(op, at("self", value, value, 1.0)))
    assert found is not None and found[1].startswith(asked)


def test_a_whole_power_of_a_negative_number_is_real() -> None:
    base = at("self", -2.0, -2.0, 1.0)
    assert negative_root(case("pow", base, number("exponent", 3))) is None
    assert negative_root(case("pow", base, number("exponent", 0.5))) is not None


def test_overflow_needs_finite_operands_without_a_pole() -> None:
    large = at("self", 1e30, 0.0, 1e30)
    assert overflow(case("mul", large, large))
    assert not overflow(case("div", large, ZERO))
    assert singular_inputs(case("mul", tensor("self", (4,), 0.0, 1.0, posinf=1)))
    assert not overflow(case("mul", tensor("self", (0,), None, None)))


def test_an_integer_divisor_counts_something() -> None:
    count = Operand(name="other", dtype="int64", shape=(4,), min=0.0, max=3.0, zeros=1)
    assert counts_nothing(case("div", ONE, count), count)


def test_a_fractional_divisor_does_not_count() -> None:
    mean = tensor("other", (4,), 0.0, 0.5, zeros=1)
    assert not counts_nothing(case("div", ONE, mean), mean)
