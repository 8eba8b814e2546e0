"""Norm layers that do not survive a row of zeros."""

from __future__ import annotations

import pytest

from preflight.asking import assert_found

FAULTS = [
    ("norm_without_eps", "norm.eps", "fail", "RMSNorm(eps=1e-20)", "e+"),
    ("hand_written_norm", "norm.eps", "fail", "HandNorm(eps=1e-08) in float16", "NaN"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)
