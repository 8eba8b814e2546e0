"""SG918: clipping that leaves next to nothing of every gradient."""

from __future__ import annotations

import math
from statistics import median

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely, possible
from stepguard.records import Reading
from stepguard.records.look import Look

NOTHING_LEFT = 0.01
"""Share of every gradient that is left."""
ENOUGH_LOOKS = 6
IN_A_ROW = 16
ALIKE = 1e-3
LEAST_SCALE = 128.0
"""Loss scale from which on a norm that carries it cannot be mistaken for one that does not."""


def recognise(case: Case) -> Proof | None:
    return _before_unscaling(case) or _clipped(case)


def _before_unscaling(case: Case) -> Proof | None:
    """After clipping to 1.0 and dividing by the scale every norm is 1.0 over the scale."""
    steps = case.recent[-IN_A_ROW:]
    if len(steps) < IN_A_ROW:
        return None
    norms = [_scaled_norm(reading) for reading in steps]
    usual = median(norms)
    if not NOTHING_LEFT < usual < 1.0 / NOTHING_LEFT:
        return None
    if max(norms) - min(norms) > ALIKE * usual:
        return None
    newest = steps[-1]
    return likely(
        f"the gradient norm times the loss scale was {usual:.4g} in each of the last {IN_A_ROW} "
        f"updates: the gradients were clipped to {usual:.4g} while they carried the scale of "
        f"{newest.scale:.0f}, which leaves a norm of {newest.grad_norm:.2g}"
    )


def _scaled_norm(reading: Reading) -> float:
    if reading.scale is None or reading.scale < LEAST_SCALE or not reading.grad_norm:
        return 0.0
    return reading.grad_norm * reading.scale


def _clipped(case: Case) -> Proof | None:
    """The norm that was read before clipping, beside that of the gradients of the update."""
    before = {reading.step: reading.grad_norm for reading in case.recent}
    looks = [look for look in case.looks if before.get(look.step) and not look.left_out]
    looks = looks[-ENOUGH_LOOKS:]
    if len(looks) < ENOUGH_LOOKS:
        return None
    left = [_norm(look) / (before[look.step] or math.inf) for look in looks]
    if max(left) > NOTHING_LEFT or min(left) <= 0.0:
        return None
    return possible(
        f"clipping left {max(left):.1%} or less of the gradient at each of the last {len(looks)} "
        f"looks: its norm was {before[looks[-1].step]:.3g} at step {looks[-1].step} and "
        f"{_norm(looks[-1]):.3g} after clipping"
    )


def _norm(look: Look) -> float:
    squares = 0.0
    for one in look.parameters:
        if one.update is not None and one.gradient is not None:
            squares += one.gradient**2 * one.elements
    return math.sqrt(squares)


RULE = Rule(code="SG918", recognise=recognise)
