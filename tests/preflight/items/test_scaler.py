"""The loss scale: missing where float16 needs it, or there without effect."""

from __future__ import annotations

import pytest

from preflight.asking import assert_found

FAULTS = [
    ("float16_context", "scaler.missing", "fail", "no GradScaler", "6e-08"),
    ("scaler_over_half_weights", "scaler.fits", "fail", "float16", "unscale"),
    ("scaler_without_need", "scaler.fits", "warn", "bfloat16", "only adds a scale"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)
