"""A step as named numbers: whatever is non-finite has a finite companion."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stepguard.records import Reading
from stepguard.report.sinks import NONFINITE, SKIPPED, finite_only, scalars

HEALTHY: dict[str, Any] = {
    "step": 7,
    "loss": 2.0,
    "micro_losses": (2.0,),
    "grad_norm": 0.5,
    "lr": (1e-3, 1e-4),
}


def test_a_healthy_step_gives_what_was_seen_and_two_zeros() -> None:
    assert scalars(Reading(**HEALTHY, components={"mse": 1.5}), committed=True) == {
        "stepguard/loss": 2.0,
        "stepguard/loss/mse": 1.5,
        "stepguard/grad_norm": 0.5,
        "stepguard/lr": 1e-3,
        "stepguard/lr/1": 1e-4,
        NONFINITE: 0.0,
        SKIPPED: 0.0,
    }


@pytest.mark.parametrize(
    "trouble",
    [
        {"loss": math.nan},
        {"loss": -math.inf},
        {"micro_losses": (2.0, math.nan)},
        {"components": {"mse": math.inf}},
        {"grad_norm": math.inf},
        {"lr": (math.nan,)},
        {"grads_finite": False},
        {"bad_state": ("param:weight",)},
    ],
    ids=lambda trouble: next(iter(trouble)),
)
def test_whatever_is_non_finite_raises_the_companion(trouble: dict[str, Any]) -> None:
    values = scalars(Reading(**{**HEALTHY, **trouble}), committed=False)
    assert (values[NONFINITE], values[SKIPPED]) == (1.0, 1.0)


def test_a_backend_that_cannot_store_nan_still_learns_that_there_was_one() -> None:
    values = finite_only(scalars(Reading(**{**HEALTHY, "loss": math.nan}), committed=False))
    assert "stepguard/loss" not in values
    assert (values[NONFINITE], values["stepguard/grad_norm"]) == (1.0, 0.5)
