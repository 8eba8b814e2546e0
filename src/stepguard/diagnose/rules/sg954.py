"""SG954: second moments that underflow."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.diagnose.ahead import log2, soonest, when
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.records.look import Look

SMALLEST = 2.0**-126
"""Smallest normal float32 number."""


def recognise(case: Case) -> Proof | None:
    found = soonest(case.looks, _moments, lambda name: math.log2(SMALLEST), rising=False)
    if found is None:
        return None
    name, points, ahead = found
    return likely(
        f"the smallest second moment of {name} fell from {2 ** points[0][1]:.2g} at step "
        f"{points[0][0]} to {2 ** points[-1][1]:.2g} at step {points[-1][0]}; it underflows "
        f"{when(ahead)}, and the update divides by epsilon alone"
    )


def _moments(look: Look) -> Iterable[tuple[str, float | None]]:
    found = []
    for one in look.parameters:
        if one.variance is not None:
            found.append((one.name, log2(one.variance)))
    return found


RULE = Rule(code="SG954", recognise=recognise)
