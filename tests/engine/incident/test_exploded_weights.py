"""An overflow in float32 on huge finite operands points at the weights, not at the operation."""

from __future__ import annotations

import math

import pytest

from engine.parts import origin_of
from stepguard.engine.incident.closer_look import (
    EXTREME,
    LOST,
    blamed_on_update,
    exploded,
    stored_culprit,
    surfaces_only,
    weights_ruined,
)
from stepguard.records import Evidence, Operand, Reading

HUGE = (Operand(name="self", max=2 * EXTREME),)
OVERFLOW = Evidence(finite_in=1e30)


def test_overflow_on_huge_finite_operands_only_surfaces_there() -> None:
    assert surfaces_only(origin_of(inputs=HUGE, evidence=OVERFLOW))


@pytest.mark.parametrize(
    "changed",
    [
        {"phase": "state"},
        {"samples": (3,)},
        {"tensor": "batch:x"},
        {"evidence": Evidence()},
        {"evidence": Evidence(finite_in=1e30, half_precision=True)},
        {"inputs": (Operand(max=1.0),)},
        {"inputs": (*HUGE, Operand(posinf=1))},
    ],
)
def test_overflow_with_a_reason_of_its_own_is_left_where_it_is(changed: dict[str, object]) -> None:
    origin = origin_of(**{"inputs": HUGE, "evidence": OVERFLOW, **changed})
    assert not surfaces_only(origin)


def test_no_origin_blames_nothing() -> None:
    assert not surfaces_only(None)
    assert not stored_culprit(None)
    assert not weights_ruined(None)


@pytest.mark.parametrize(
    ("tensor", "guilty"),
    [("param:0.weight", True), ("buffer:bn.running_var", True), ("opt:exp_avg", False)],
)
def test_stored_tensors_of_the_model_are_met_by_the_next_batch(tensor: str, guilty: bool) -> None:
    assert stored_culprit(origin_of(phase="state", tensor=tensor)) == guilty


def test_stored_tensor_that_is_data_to_this_guard_is_not_a_culprit() -> None:
    origin = origin_of(phase="state", tensor="param:table", evidence=Evidence(as_data=True))
    assert not stored_culprit(origin)


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [(math.nan, 1.0, True), (math.inf, 1.0, True), (2 * LOST, 1.0, True), (50.0, 1.0, False)],
)
def test_earlier_batch_that_fails_now_ruins_the_weights(
    now: float, then: float, expected: bool
) -> None:
    assert exploded((now, then)) == expected


def test_blame_moves_to_the_update_and_keeps_where_it_surfaced() -> None:
    origin = origin_of(op="aten.exp", module="net", inputs=HUGE, evidence=OVERFLOW)
    blamed = blamed_on_update(origin, Reading(step=0, repeat_loss=1e9))
    assert (blamed.phase, blamed.op, blamed.module) == ("optimizer", None, None)
    assert blamed.evidence.surfaced_at == "aten.exp"
    assert weights_ruined(blamed)
