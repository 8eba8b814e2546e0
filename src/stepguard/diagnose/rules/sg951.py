"""SG951: a loss scale that collapses."""

from __future__ import annotations

import math

from stepguard.diagnose.crossing import crossing
from stepguard.diagnose.ahead import when
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely

FEWEST_HALVINGS = 4
"""A scaler that finds its scale halves it a few times and stays."""


def recognise(case: Case) -> Proof | None:
    points = []
    for reading in case.recent:
        if reading.scale:
            points.append((reading.step, math.log2(reading.scale)))
    if len(points) < 2 or points[0][1] - points[-1][1] < FEWEST_HALVINGS:
        return None
    ahead = crossing(points, 0.0, rising=False)
    if ahead is None:
        return None
    return likely(
        f"the loss scale fell from {2 ** points[0][1]:g} at step {points[0][0]} to "
        f"{2 ** points[-1][1]:g} at step {points[-1][0]}; at this rate it is below 1 {when(ahead)}"
    )


RULE = Rule(code="SG951", recognise=recognise)
