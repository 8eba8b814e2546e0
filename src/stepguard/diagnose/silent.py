"""Silent failures: what trains wrongly with finite numbers, from deep looks and plain readings.

Their rules (SG9xx) are ordinary rules that look at a healthy run instead of a bad step. They never
veto anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepguard.diagnose.case import Case
from stepguard.diagnose.rules import RULES
from stepguard.records import Finding, Reading
from stepguard.records.look import Look
from stepguard.records.verdict import OK

SERIES = "SG9"


def silent_findings(
    looks: Sequence[Look], recent: Sequence[Reading], *, schedule_stood_for: int = 0
) -> tuple[Finding, ...]:
    """What the run does wrong without a bad value, by code. Pure."""
    newest = recent[-1] if recent else Reading(step=looks[-1].step if looks else 0)
    case = Case(
        reading=newest,
        verdict=OK,
        looks=tuple(looks),
        recent=tuple(recent),
        schedule_stood_for=schedule_stood_for,
    )
    found = []
    for rule in RULES:
        if rule.code.startswith(SERIES):
            finding = rule.examine(case)
            if finding is not None:
                found.append(finding)
    return tuple(found)
