"""SG906: almost all targets are ignored."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import last_looks

MOST_IGNORED = 0.99
LABELLED = 0.9
"""Targets that count, for each sample, that are enough."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    for look in looks:
        facts = look.facts
        if not facts.labels or facts.ignored < MOST_IGNORED * facts.labels:
            return None
        # an answer of one token leaves one target of a row, and means to
        if facts.labels - facts.ignored >= LABELLED * facts.samples:
            return None
    facts = looks[-1].facts
    return certain(
        f"{facts.ignored:,} of the {facts.labels:,} targets of step {looks[-1].step} are "
        f"ignore_index: most of the {facts.samples} samples have none that counts"
    )


RULE = Rule(code="SG906", recognise=recognise)
