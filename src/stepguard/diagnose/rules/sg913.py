"""SG913: an average of weights that does not follow."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import named, trained

FEWEST = 3
LONG = 2000
"""Steps after which an average that is updated once an epoch would have moved."""


def recognise(case: Case) -> Proof | None:
    looks = case.looks
    if len(looks) < FEWEST or not any(one.update for one in trained(looks[-1])):
        return None
    if not case.ended:
        looks = tuple(look for look in looks if look.step >= looks[-1].step - 2 * LONG)
        if looks[-1].step - looks[0].step < LONG:
            return None
    still = []
    for name, digest in looks[-1].facts.averages.items():
        if all(look.facts.averages.get(name) == digest for look in looks):
            still.append(name)
    if not still:
        return None
    return certain(
        f"{named(still)} holds exactly what it held at step {looks[0].step}, while the weights "
        "have moved on"
    )


RULE = Rule(code="SG913", recognise=recognise)
