"""SG915: shapes that are spread over each other in the loss."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import last_looks


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or not all(look.facts.broadcast for look in looks):
        return None
    op, one, other = looks[-1].facts.broadcast
    return certain(
        f"{op} of steps {looks[0].step} and {looks[-1].step} is given shapes {one} and {other}, "
        "and compares every output with every target"
    )


RULE = Rule(code="SG915", recognise=recognise)
