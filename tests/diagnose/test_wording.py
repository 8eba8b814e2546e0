"""Operands and numbers in the words of a finding."""

from __future__ import annotations

import pytest

from diagnose.diagnose_literals import number, tensor
from stepguard.diagnose.rule import broken_by, counts, describe, limit_of, spell


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "unknown"), (3.0, "3"), (0.1, "0.1"), (1e30, "1e+30"), (float("inf"), "inf")],
)
def test_numbers_are_short(value: float | None, words: str) -> None:
    assert spell(value) == words


def test_an_operand_is_described_by_type_range_and_counts() -> None:
    operand = tensor("other", (4, 1), 0.0, 1.5, zeros=1, nan=2)
    assert describe(operand) == (
        "`other` (float32, shape (4, 1)) spans 0 to 1.5, with 2 of 4 elements NaN, "
        "1 of 4 elements zero"
    )


def test_zeros_of_a_constant_operand_are_not_counted_again() -> None:
    assert describe(tensor("x", (4,), 0.0, 0.0, zeros=4)) == "`x` (float32, shape (4,)) is 0"


def test_an_operand_without_a_finite_element_has_no_range() -> None:
    assert describe(tensor("x", (2,), None, None, nan=2)) == (
        "`x` (float32, shape (2,)), with 2 of 2 elements NaN"
    )


def test_a_python_number_is_its_value() -> None:
    assert describe(number("eps", 1e-8)) == "`eps` is 1e-08"


def test_nothing_is_described_as_nothing() -> None:
    assert describe(None) == ""
    assert counts(tensor("x", (2,), 0.0, 1.0)) == ""


def test_the_breaking_element_is_named_only_where_it_is_known() -> None:
    assert broken_by(tensor("x", (2,), 0.0, 1.0)) == ""
    known = tensor("x", (2,), -1.0, 1.0, index=(1,), value=-1.0)
    assert broken_by(known) == "the value that broke it is -1 at index (1,)"


def test_the_limit_of_a_dtype_is_named_with_its_number() -> None:
    assert limit_of("torch.float16") == "65504, the largest float16"
    assert limit_of("int4") == "the largest int4"
