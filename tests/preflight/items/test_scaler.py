"""The loss scale: missing where float16 needs it, or there without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from preflight.asking import assert_found
from stepguard.check.inspection import CheckContext, Inspection
from stepguard.check.preflight import Subject, run_item

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


def test_scaler_that_would_raise_is_not_the_fix_for_float16_weights() -> None:
    model = nn.Linear(2, 2).half()
    found = run_item("scaler.missing", Inspection(Subject(model=model), CheckContext(Path())))
    assert found.status == "fail"
    assert found.fix.startswith("Keep the weights in float32")
