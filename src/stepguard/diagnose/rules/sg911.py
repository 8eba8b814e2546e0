"""SG911: attention that looks at one key only."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import in_all, last_looks, named
from stepguard.records.look import Look

COLLAPSED = 0.95
LEAST_KEYS = 8


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    modules = in_all(looks, _collapsed)
    if not modules:
        return None
    # one that began like this was made like this
    if case.looks[0] in looks or set(modules) <= _collapsed(case.looks[0]):
        return None
    worst = max(
        (one for one in looks[-1].attention if one.module in modules),
        key=lambda one: one.largest_logit,
    )
    return likely(
        f"{worst.collapsed:.0%} of the rows of {worst.module} have all their weight on one key at "
        f"step {looks[-1].step}; the largest logit is {worst.largest_logit:.0f}",
        f"the same in {named(modules)}" if len(modules) > 1 else "",
    )


def _collapsed(look: Look) -> set[str]:
    found = set()
    for one in look.attention:
        if one.collapsed >= COLLAPSED and one.keys >= LEAST_KEYS:
            found.add(one.module)
    return found


RULE = Rule(code="SG911", recognise=recognise)
