"""SG955: a norm that grows without bound."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.diagnose.crossing import crossing
from stepguard.diagnose.ahead import log2, soonest, when
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.records.look import Look

LARGEST = 2.0**127
"""What float32 and bfloat16 can hold."""
SQUARES = {"float16": 2.0**8}
"""Input of a norm whose square overflows; elsewhere the root of the largest number."""
FEWEST_DOUBLINGS = 6.0
"""Growth of a gradient norm within the window that no healthy run shows."""


def recognise(case: Case) -> Proof | None:
    return _input_of_norm(case) or _gradient_norm(case)


def _input_of_norm(case: Case) -> Proof | None:
    found = soonest(case.looks, _scales, _limit, rising=True)
    if found is None:
        return None
    name, points, ahead = found
    return likely(
        f"the input of {name} grew from {2 ** points[0][1]:.3g} at step {points[0][0]} to "
        f"{2 ** points[-1][1]:.3g} at step {points[-1][0]}; its square overflows {when(ahead)}"
    )


def _scales(look: Look) -> Iterable[tuple[str, float | None]]:
    return [(f"{one.module} ({one.dtype})", log2(one.scale)) for one in look.norms]


def _limit(name: str) -> float:
    dtype = name.rpartition("(")[2].rstrip(")")
    return math.log2(SQUARES.get(dtype, 2.0**63))


def _gradient_norm(case: Case) -> Proof | None:
    points = []
    for reading in case.recent:
        value = log2(reading.grad_norm or 0.0)
        if value is not None:
            points.append((reading.step, value))
    if len(points) < 2 or points[-1][1] - points[0][1] < FEWEST_DOUBLINGS:
        return None
    ahead = crossing(points, math.log2(LARGEST), rising=True)
    if ahead is None:
        return None
    return likely(
        f"the gradient norm grew from {2 ** points[0][1]:.3g} at step {points[0][0]} to "
        f"{2 ** points[-1][1]:.3g} at step {points[-1][0]}; it overflows float32 {when(ahead)}"
    )


RULE = Rule(code="SG955", recognise=recognise)
