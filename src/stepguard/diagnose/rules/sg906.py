"""SG906: almost all targets are ignored."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import last_looks

MOST_IGNORED = 0.99


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    for look in looks:
        facts = look.facts
        if not facts.labels or facts.ignored < MOST_IGNORED * facts.labels:
            return None
    facts = looks[-1].facts
    return certain(
        f"{facts.ignored:,} of the {facts.labels:,} targets of step {looks[-1].step} are "
        "ignore_index: the loss is made of the rest"
    )


RULE = Rule(code="SG906", recognise=recognise)
