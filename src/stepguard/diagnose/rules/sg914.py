"""SG914: probabilities in the place of logits."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import newest_look


def recognise(case: Case) -> Proof | None:
    look = newest_look(case)
    if look is None or not look.facts.softmax_twice:
        return None
    return certain(
        f"every row that goes into the cross entropy of step {look.step} is positive and sums to "
        "1: it has been through a softmax, and cross_entropy takes another one"
    )


RULE = Rule(code="SG914", recognise=recognise)
