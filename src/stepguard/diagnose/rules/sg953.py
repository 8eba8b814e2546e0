"""SG953: values that outgrow their dtype."""

from __future__ import annotations

from collections.abc import Iterable

from stepguard.diagnose.ahead import soonest, when
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.records.look import Look

NEAR = 8.0
"""Bits of headroom from which on a trend is told."""


def recognise(case: Case) -> Proof | None:
    found = soonest(case.looks, _headroom, lambda name: 0.0, rising=False)
    if found is None:
        return None
    name, points, ahead = found
    if points[-1][1] > NEAR:
        return None
    return likely(
        f"{name}: {points[0][1]:.1f} bits below the largest number at step {points[0][0]}, "
        f"{points[-1][1]:.1f} bits at step {points[-1][0]}; it overflows {when(ahead)}"
    )


def _headroom(look: Look) -> Iterable[tuple[str, float | None]]:
    found = []
    for one in look.tensors:
        if one.stage != "stored":
            place = one.module or "outside of modules"
            found.append((f"{one.stage} in {place}, {one.dtype}", one.headroom))
    return found


RULE = Rule(code="SG953", recognise=recognise)
