"""What a healthy run is heading for: trends of its looks and readings, extended to their limits.

Their rules (SG95x) are asked like those on silent failures. They never veto anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepguard.diagnose.ahead import soonest
from stepguard.diagnose.crossing import BEGINNING
from stepguard.diagnose.rules import RULES, sg952, sg953, sg954, sg955, sg956
from stepguard.diagnose.silent import healthy_case
from stepguard.records import Finding, Reading
from stepguard.records.forecast import Forecast
from stepguard.records.look import Look

SERIES = "SG95"
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
    """Something may be on its way to a limit: worth looking more often, not worth telling."""
    if sg955.diverging(recent, sg955.BEGINS) is not None:
        return True
    return any(soonest(looks, trend, BEGINNING) is not None for trend in TRENDS)
