"""SG907: the same batch again and again."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import last_looks

IN_A_ROW = 3


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case, IN_A_ROW)
    if not looks or not looks[0].facts.batch:
        return None
    if len({look.facts.batch for look in looks}) > 1:
        return None
    # An epoch may be as long as the time between two looks; and who keeps one tensor in memory
    # (all of the data, a graph, a grid) means to.
    if any(look.facts.batch_after != "equal" for look in looks[1:]):
        return None
    steps = ", ".join(str(look.step) for look in looks)
    return likely(
        f"the batches of steps {steps} and of the steps after them are the same, bit for bit, each "
        "time in new memory"
    )


RULE = Rule(code="SG907", recognise=recognise)
