"""SG951: a loss scale that collapses."""

from __future__ import annotations

import math

from stepguard.diagnose.ahead import forecast_of
from stepguard.diagnose.case import Case
from stepguard.diagnose.crossing import crossing
from stepguard.diagnose.rule import Proof, Rule, foretold

LOWEST = 1.0
"""A scale below makes small gradients smaller instead of larger."""


def recognise(case: Case) -> Proof | None:
    points = changes(case)
    ahead = crossing(points, math.log2(LOWEST), rising=False)
    if ahead is None or not _worked(case, points, ahead.since):
        return None
    forecast = forecast_of("the loss scale", "", points, math.log2(LOWEST), ahead)
    return foretold(forecast, "every step is skipped from then on, or small gradients are 0")


def changes(case: Case) -> list[tuple[int, float]]:
    """The scale where it changed, and now: what stays for long would hide the direction."""
    points: list[tuple[int, float]] = []
    for reading in case.recent:
        if reading.scale:
            value = math.log2(reading.scale)
            if not points or points[-1][1] != value or reading is case.recent[-1]:
                points.append((reading.step, value))
    return points


def _worked(case: Case, points: list[tuple[int, float]], since: int) -> bool:
    """A step went through at the scale the fall began with; else the scaler looks for its scale."""
    scale = 2.0 ** dict(points)[since]
    return any(reading.scale == scale and reading.grads_finite for reading in case.recent)


RULE = Rule(code="SG951", recognise=recognise)
