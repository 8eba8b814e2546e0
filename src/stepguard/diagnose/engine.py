"""From an incident to its findings: every rule looks at the case, the most certain speaks first."""

from __future__ import annotations

from dataclasses import replace

from stepguard.diagnose.case import Case
from stepguard.diagnose.rules import RULES
from stepguard.diagnose.run_facts import RunFacts
from stepguard.records import Finding, Incident

LEAST_CONFIDENCE = 0.3
MOST_FINDINGS = 4


def diagnose(incident: Incident, facts: RunFacts | None = None) -> tuple[Finding, ...]:
    """Findings with evidence, most likely first; empty when no rule can prove anything. Pure."""
    case = Case(
        reading=incident.reading,
        verdict=incident.verdict,
        origin=incident.origin,
        facts=facts if facts is not None else RunFacts(),
    )
    found = (rule.examine(case) for rule in RULES)
    proven = [
        finding
        for finding in found
        if finding is not None and finding.confidence >= LEAST_CONFIDENCE
    ]
    proven.sort(key=lambda finding: (-finding.confidence, finding.code))
    return tuple(_with_way(finding, case) for finding in proven[:MOST_FINDINGS])


def _with_way(finding: Finding, case: Case) -> Finding:
    """How a NaN of the forward passed a finite loss."""
    dropped_by = case.evidence.discarded_by
    if dropped_by is None:
        return finding
    way = (
        f"{dropped_by} left the NaN out of the loss further on; its gradient, 0 times NaN, was "
        f"not left out"
    )
    return replace(finding, evidence=(*finding.evidence, way))
