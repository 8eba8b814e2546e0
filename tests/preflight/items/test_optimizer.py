"""The optimizer: eps, parameters and stalled updates."""

from __future__ import annotations

import pytest

from preflight.asking import assert_found

FAULTS = [
    ("half_weights", "optimizer.eps", "fail", "eps=1e-08 is 0 in float16", "0 / 0"),
    ("optimizer_of_another_model", "optimizer.parameters", "fail", "none of the model's", ""),
    ("head_left_out", "optimizer.parameters", "warn", "2 trainable parameters", "head.weight"),
    ("bfloat16_weights", "optimizer.stalled", "warn", "bfloat16", "leaves them as they are"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)
