"""SG916: targets that the output cannot reach."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import last_looks

MOST_BEYOND = 0.1
"""Share of the targets that may lie beyond: noise, and a few outliers."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or min(look.facts.beyond for look in looks) < MOST_BEYOND:
        return None
    facts = looks[-1].facts
    return certain(
        f"the output of the model ends in {facts.bound}, and {facts.beyond:.0%} of the targets of "
        f"step {looks[-1].step} lie outside its range"
    )


RULE = Rule(code="SG916", recognise=recognise)
