"""Operands and numbers in the words of a finding."""

from __future__ import annotations

import pytest

from diagnose.diagnose_literals import number, tensor
from stepguard.diagnose import Case
from stepguard.diagnose.rule import counts, describe, fill, holds, limit_of, spell
from stepguard.records import Reading, Verdict

CASE = Case(reading=Reading(step=7), verdict=Verdict())


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
    sentence = "it is {x:element}"
    assert fill(sentence, CASE, {"x": tensor("x", (2,), 0.0, 1.0)}) == ""
    known = tensor("x", (2,), -1.0, 1.0, index=(1,), value=-1.0)
    assert fill(sentence, CASE, {"x": known}) == "it is -1 at index (1,)"


@pytest.mark.parametrize("unknown", [None, False, "", (), []])
def test_a_sentence_without_one_of_its_numbers_is_dropped(unknown: object) -> None:
    assert fill("step {reading.step}: {x}", CASE, {"x": unknown}) == ""
    assert fill("step {reading.step}[?: {x}?]", CASE, {"x": unknown}) == "step 7"
    assert fill("[?{x}|step {reading.step}?]", CASE, {"x": unknown}) == "step 7"


def test_zero_and_nan_are_known_numbers() -> None:
    assert fill("{x} and {y}", CASE, {"x": 0.0, "y": float("nan")}) == "0 and nan"


def test_what_a_user_wrote_is_not_read_as_a_field() -> None:
    assert fill("`{x}`[? in {y}?]", CASE, {"x": 'b["{x}"]', "y": "{z}"}) == '`b["{x}"]` in {z}'


def test_of_many_names_the_first_are_said() -> None:
    assert fill("{x}", CASE, {"x": ["a", "b", "c", "d", "e"]}) == "a, b, c and 2 more"
    assert fill("{x}", CASE, {"x": (1.0, 0.5)}) == "1, 0.5"


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(AttributeError, match="evidense"):
        fill("{evidense.eps}", CASE, {})


def test_a_condition_names_what_is_known_and_what_is_not() -> None:
    assert holds("", CASE, {})
    assert holds("x, not y", CASE, {"x": 0.0, "y": None})
    assert not holds("x, not y", CASE, {"x": 0.0, "y": True})


def test_the_limit_of_a_dtype_is_named_with_its_number() -> None:
    assert limit_of("torch.float16") == "65504, the largest float16"
    assert limit_of("int4") == "the largest int4"
