"""Precision: contradictions between places that ask for one, and what the step really runs in."""

from __future__ import annotations

import pytest

from preflight.asking import ask, assert_found

FAULTS = [
    (
        "float16_context",
        "precision.effective",
        "fail",
        "3 of 3 matrix products",
        "asks for bfloat16",
    ),
    (
        "fp16_ignored_on_cpu",
        "precision.effective",
        "fail",
        "came out as float32",
        "mixed_precision='fp16'",
    ),
    (
        "amp_without_a_dtype",
        "precision.unnamed",
        "fail",
        "float16 on cuda",
        "launcher's mixed_precision=bf16",
    ),
    ("launcher_overruled", "precision.configured", "fail", "the launcher", "asks for float32"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)


def test_no_alignment_is_claimed_against_the_probe() -> None:
    result = ask("tinychat.faults:float16_context", "precision")
    assert result.alignment == "contradicted"
    assert "came out as float16" in result.alignment_why[0]
    assert "asks for bfloat16" in result.alignment_why[1]
