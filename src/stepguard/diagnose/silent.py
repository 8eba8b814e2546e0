"""Silent failures: what trains wrongly with finite numbers, from deep looks and plain readings.

Their rules (SG9xx) are ordinary rules that look at a healthy run instead of a bad step. They never
veto anything. Those on what is still to come (SG95x) are asked in `diagnose/forecast.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepguard.diagnose.case import Case
from stepguard.diagnose.rules import RULES
from stepguard.records import Finding, Reading
from stepguard.records.look import Look
from stepguard.records.verdict import OK

SERIES = ("SG90", "SG91", "SG92")
HEALTHY_SERIES = "SG9"
"""Of a run in which every step is finite: these and forecasts."""


def silent_findings(
    looks: Sequence[Look], recent: Sequence[Reading], **known: Any
) -> tuple[Finding, ...]:
    """What the run does wrong without a bad value, by code. Pure.

    `known`: further fields of the case, such as `ended`.
    """
    case = replace(healthy_case(looks, recent), **known)
    found = []
    for rule in RULES:
        if rule.code.startswith(SERIES):
            finding = rule.examine(case)
            if finding is not None:
                found.append(finding)
    return tuple(found)


def healthy_case(looks: Sequence[Look], recent: Sequence[Reading]) -> Case:
    """A run without a bad step, as the rules see it."""
    newest = recent[-1] if recent else Reading(step=looks[-1].step if looks else 0)
    return Case(reading=newest, verdict=OK, looks=tuple(looks), recent=tuple(recent))
