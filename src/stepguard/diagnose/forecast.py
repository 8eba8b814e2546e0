"""What a healthy run is heading for: trends of its looks and readings, extended to their limits.

Their rules (SG95x) are asked like those on silent failures. They never veto anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepguard.diagnose.ahead import Trend
from stepguard.diagnose.rules import RULES, sg952, sg953, sg954, sg955, sg956
from stepguard.diagnose.silent import healthy_case
from stepguard.records import Finding, Reading
from stepguard.records.forecast import Forecast
from stepguard.records.look import Look

SERIES = "SG95"
MOVED = 0.1
"""Doublings between two looks that are a movement."""
TRENDS = (sg952.TREND, sg953.TREND, sg954.TREND, sg955.TREND, sg956.TREND)


def forecasts(
    looks: Sequence[Look], recent: Sequence[Reading]
) -> tuple[tuple[Finding, Forecast], ...]:
    """What comes if the run goes on like this, by code. Pure.

    `recent` holds committed steps and those that a GradScaler skipped.
    """
    case = healthy_case(looks, recent)
    found = []
    for rule in RULES:
        if rule.code.startswith(SERIES):
            proof = rule.recognise(case)
            if proof is not None and proof.forecast is not None:
                found.append((rule.finding(proof), proof.forecast))
    return tuple(found)


def trend_begins(looks: Sequence[Look], recent: Sequence[Reading]) -> bool:
    """Something is near a limit, or on its way there: worth a closer look, not worth reporting."""
    if sg955.diverging(recent, sg955.BEGINS) is not None:
        return True
    return len(looks) > 1 and any(_moves_on(looks[-2], looks[-1], trend) for trend in TRENDS)


def _moves_on(before: Look, now: Look, trend: Trend) -> bool:
    """Is a figure that is near its limit nearer than at the look before?"""
    sign = 1.0 if trend.rising else -1.0
    earlier = {one.place: one.value for one in trend.figures(before)}
    for figure in trend.figures(now):
        then = earlier.get(figure.place)
        if not figure.near or figure.value is None or then is None:
            continue
        if sign * (figure.value - then) > MOVED:
            return True
    return False
