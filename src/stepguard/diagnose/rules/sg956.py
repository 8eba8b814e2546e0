"""SG956: updates above the stable range."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.diagnose.ahead import log2, soonest, when
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.records.look import Look

UNSTABLE = 0.3
"""An update this large beside its weight: a few of them replace the weight."""
NEAR = 0.02


def recognise(case: Case) -> Proof | None:
    found = soonest(case.looks, _ratios, lambda name: math.log2(UNSTABLE), rising=True)
    if found is None:
        return None
    name, points, ahead = found
    if 2 ** points[-1][1] < NEAR:
        return None
    return likely(
        f"updates of {name} grew from {2 ** points[0][1]:.2g} of the weight at step {points[0][0]} "
        f"to {2 ** points[-1][1]:.2g} at step {points[-1][0]}; they pass {UNSTABLE:g} {when(ahead)}"
    )


def _ratios(look: Look) -> Iterable[tuple[str, float | None]]:
    found = []
    for one in look.parameters:
        # biases begin at 0, and any update is large beside nothing
        if one.ratio is not None and one.elements >= 64:
            found.append((one.name, log2(one.ratio)))
    return found


RULE = Rule(code="SG956", recognise=recognise)
