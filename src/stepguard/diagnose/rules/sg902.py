"""SG902: gradients that are not zeroed between steps."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import last_looks


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or not all(look.facts.kept_gradients for look in looks):
        return None
    return certain(
        f"the backward passes of steps {looks[0].step} and {looks[-1].step} began with the "
        "gradients of the steps before them: they add up over the whole run"
    )


RULE = Rule(code="SG902", recognise=recognise)
