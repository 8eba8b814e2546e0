"""From an incident to its findings: every rule examines the case, the most certain goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from stepguard.diagnose.case import Case
from stepguard.diagnose.operand_names import name_operands
from stepguard.diagnose.remedies import in_their_words
from stepguard.diagnose.rules import RULES
from stepguard.diagnose.run_facts import RunFacts
from stepguard.records import Certainty, Finding, Incident

MOST_FINDINGS = 4
CERTAINTY_ORDER: tuple[str, ...] = get_args(Certainty)
SHOWN_BY = {rule.code: rule.shown_by for rule in RULES}
YIELDS_TO = {rule.code: frozenset(rule.yields_to) for rule in RULES}


def diagnose(incident: Incident, facts: RunFacts | None = None) -> tuple[Finding, ...]:
    """Findings with evidence, most certain first; empty when no rule can prove anything. Pure."""
    origin = incident.origin
    if origin is not None:
        origin = name_operands(origin)
    case = Case(
        reading=incident.reading,
        verdict=incident.verdict,
        origin=origin,
        facts=facts if facts is not None else RunFacts(),
    )
    found = [rule.examine(case) for rule in RULES]
    findings = [earned(one, case) for one in ranked([one for one in found if one is not None])]
    findings = uncontested(findings)
    # stable: of findings that are equally sure now, the one whose numbers fit best goes first
    findings.sort(key=_certainty)
    shown = [in_their_words(finding, case) for finding in findings[:MOST_FINDINGS]]
    return tuple(_with_way(finding, case) for finding in shown)


def earned(finding: Finding, case: Case) -> Finding:
    """The finding, at most likely unless its cause was seen and not concluded.

    Rules say how well the numbers fit; whether those numbers were observed is decided here, for
    all of them.
    """
    shown_by = SHOWN_BY[finding.code]
    seen = case.observed if shown_by == "operation" else shown_by == "record"
    if finding.certainty != "certain" or seen:
        return finding
    return replace(finding, certainty="likely")


def uncontested(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, at most likely where another cause is as certain and explains it otherwise.

    One that yields to the other is the same fault seen closer: the 0 that is divided by, and the
    epsilon that was rounded to it.
    """
    sure = [finding for finding in findings if finding.certainty == "certain"]
    judged = []
    for finding in findings:
        rivals = [
            other
            for other in sure
            if other is not finding
            and other.code not in YIELDS_TO[finding.code]
            and finding.code not in YIELDS_TO[other.code]
        ]
        contested = finding.certainty == "certain" and rivals
        judged.append(replace(finding, certainty="likely") if contested else finding)
    return judged


def _certainty(finding: Finding) -> int:
    return CERTAINTY_ORDER.index(finding.certainty)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """By certainty, then by what the rules yield to, then by code."""
    waiting = sorted(findings, key=lambda finding: (_certainty(finding), finding.code))
    ordered: list[Finding] = []
    while waiting:
        equals = [finding for finding in waiting if finding.certainty == waiting[0].certainty]
        codes = {finding.code for finding in equals}
        # what rules yield to has no cycle (a test keeps it so): at least one is free
        free = [finding for finding in equals if not YIELDS_TO[finding.code] & codes]
        ordered.append(free[0])
        waiting.remove(free[0])
    return ordered


def _with_way(finding: Finding, case: Case) -> Finding:
    """Add how a NaN of the forward passed a finite loss."""
    dropped_by = case.evidence.discarded_by
    if dropped_by is None:
        return finding
    way = (
        f"{dropped_by} left the NaN out of the loss further on; its gradient, 0 times NaN, was "
        f"not left out"
    )
    return replace(finding, evidence=(*finding.evidence, way))
