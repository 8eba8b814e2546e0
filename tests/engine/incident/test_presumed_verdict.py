"""What the cheap reading proves is refused even where the verdict failed by a fault of our own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from stepguard.engine.incident.closer_look import presumed_reading, presumed_verdict
from stepguard.records import Reading


def _context(*, scaling: bool = False) -> Any:
    return SimpleNamespace(scaling=lambda: scaling)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "ok"),
        ({"loss": math.nan}, "nonfinite_loss"),
        ({"micro_losses": (1.0, math.inf)}, "nonfinite_loss"),
        ({"grads_finite": False}, "nonfinite_gradient"),
        ({"grad_norm": math.inf}, "infinite_norm"),
        ({"bad_state": ("state",)}, "nonfinite_parameter"),
        ({"bad_state": ("param:w",), "state_born": True}, "nonfinite_parameter"),
    ],
)
def test_what_is_proven_bad_is_refused_and_all_else_passes(
    fields: dict[str, Any], kind: str
) -> None:
    verdict = presumed_verdict(_context(), Reading(**{"step": 3, "loss": 1.0, **fields}))
    assert verdict.kind == kind
    assert verdict.bad == (kind != "ok")


def test_buffers_alone_prove_nothing() -> None:
    reading = Reading(step=3, loss=1.0, bad_state=("buffers",))
    assert presumed_reading(_context(), reading).bad_state == ()
    assert presumed_verdict(_context(), reading).kind == "ok"


def test_gradients_that_a_scaler_may_have_overflowed_are_its_calibration() -> None:
    reading = Reading(step=3, loss=1.0, grads_finite=False)
    assert presumed_verdict(_context(scaling=True), reading).kind == "scale_calibration"
    by_loss = Reading(step=3, loss=math.nan, grads_finite=False)
    assert presumed_verdict(_context(scaling=True), by_loss).kind == "nonfinite_loss"
