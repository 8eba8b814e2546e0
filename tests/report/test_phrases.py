"""Numbers and tensors in words."""

from __future__ import annotations

import math
import typing

import pytest

from stepguard.records import Operand, Origin
from stepguard.records.incident import VerdictKind
from stepguard.report import phrases


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (12, "12th"),
        (21, "21st"),
        (111, "111th"),
    ],
)
def test_ordinals(n: int, text: str) -> None:
    assert phrases.ordinal(n) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (65536.0, "65536"),
        (0.41234567, "0.4123"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1e30, "1e+30"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert phrases.number(value) == text


def test_groups_that_share_a_rate_are_one_number() -> None:
    assert phrases.rates((1e-4, 1e-4)) == "1.00e-04"
    assert phrases.rates((1e-4, 2e-4)) == "1.00e-04 / 2.00e-04"
    assert phrases.rates(()) == ""


def test_scalar_operand_is_its_value() -> None:
    assert (
        phrases.operand(Operand(name="other", dtype="float32", value=0.0, min=0.0, max=0.0))
        == "float32; 0"
    )


def test_tensor_without_dimensions_has_no_position() -> None:
    value = Operand(dtype="float32", nan=1, index=(), value=math.nan)
    assert phrases.operand(value) == "float32; nan; 1 NaN"


def test_operand_counts_what_is_wrong() -> None:
    tensor = Operand(
        dtype="float16", shape=(2, 3), nan=1, posinf=2, neginf=3, zeros=1, min=-1.0, max=2.0
    )
    assert (
        phrases.operand(tensor)
        == "float16 [2,3]; 1 NaN, 2 +Inf, 3 -Inf of 6; 1 zero; finite -1 to 2"
    )


def test_many_samples_are_cut() -> None:
    origin = Origin(step=0, phase="input", samples=tuple(range(20)), micro_batch=1, rank=3)
    assert (
        phrases.culprits(origin)
        == "samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more, micro-batch 2, rank 3"
    )


def test_sparkline_shows_a_rise_over_decades_and_marks_what_is_not_finite() -> None:
    assert phrases.sparkline([1.0, 10.0, 100.0, math.nan]) == "▁▅█!"
    assert phrases.sparkline([0.0, 1.0], plain=True) == "_@"
    assert phrases.sparkline([2.0, 2.0]) == "▁▁"
    assert phrases.sparkline([math.inf]) == "!"
    assert phrases.sparkline([]) == ""


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((), "samples 3, 5"),
        (("row 17", "row 48211"), "samples 3, 5 = row 17, row 48211 of the data set"),
        (("id a.png", "id b.png"), "samples 3, 5 = id a.png, id b.png"),
        (
            ("row 1 (id a)", "row 2 (id b)"),
            "samples 3, 5 = row 1 (id a), row 2 (id b) of the data set",
        ),
    ],
)
def test_samples_are_named_by_their_rows_of_the_data_set(rows: tuple[str, ...], said: str) -> None:
    assert phrases.culprits(Origin(step=0, phase="input", samples=(3, 5), rows=rows)) == said


def test_long_id_of_a_sample_keeps_both_ends() -> None:
    origin = Origin(
        step=0, phase="input", samples=(3,), rows=("id s3://" + "x" * 90 + "/0042.png",)
    )
    said = phrases.culprits(origin)
    assert len(said) < 60 and said.startswith("sample 3 = id s3://") and said.endswith("/0042.png")


def test_every_kind_of_verdict_has_a_title() -> None:
    kinds = set(typing.get_args(VerdictKind)) - {"ok"}
    assert set(phrases.VERDICT_TITLES) == kinds
    assert phrases.verdict_title("save-refused") == "save-refused"


def test_number_of_bytes_in_words() -> None:
    words = [phrases.size(count) for count in (12, 1200, 3_400_000, 2.1e9, 5e12)]
    assert words == ["12 B", "1.2 kB", "3.4 MB", "2.1 GB", "5 TB"]
