"""Stored values, one real step, and limits on single parameters."""

from __future__ import annotations

import pytest

from preflight.asking import assert_found

FAULTS = [
    ("poisoned_weights", "model.stored_finite", "fail", "param:head.weight", "1 of 128 values"),
    (
        "poisoned_statistics",
        "model.stored_finite",
        "fail",
        "buffer:batch_norm.running_var",
        "1 of 8 values",
    ),
    ("loss_of_zero_over_zero", "model.fresh_forward", "fail", "loss nan", ""),
    ("infinite_slope", "model.fresh_forward", "fail", "bad gradients: alpha", "loss"),
    ("runaway_scalar", "scalars.limit", "fail", "alpha reaches 88.7", "allowed is 10"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)
