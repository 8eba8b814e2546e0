"""SG901: updates that rounding loses."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.seen import last_looks, named, rate_is_zero, trained
from stepguard.records.look import Look, ParameterLook

MOST_LOST = 0.5
"""Share of the elements with a gradient that an update may leave as they were."""
NARROW = ("bfloat16", "float16")
VANISHED = 1e-8
"""Root mean square of a gradient below which Adam's epsilon is larger."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or rate_is_zero(case):
        return None
    shares = [_lost_share(look) for look in looks]
    if min(shares) < MOST_LOST:
        return None
    rows = _losing(looks[-1])
    dtypes = sorted({one.dtype for one in rows})
    sentence = (
        f"{shares[-1]:.0%} of all weights with a gradient are exactly as before the update of step "
        f"{looks[-1].step}: {named([one.name for one in rows])} in {named(dtypes)}"
    )
    if set(dtypes) <= set(NARROW):
        return certain(sentence, "bfloat16 holds 8 bits: a change below 0.4 % of a weight is lost")
    if all((one.gradient or 0.0) < VANISHED for one in rows):
        return None  # there is nothing to round: the gradients are next to 0 themselves
    if _lost_share(case.looks[0]) < MOST_LOST:
        return None  # it has moved before: float32 is fine enough, the run has converged
    return likely(sentence)


def _losing(look: Look) -> list[ParameterLook]:
    return [one for one in trained(look) if (one.lost or 0.0) > MOST_LOST]


def _lost_share(look: Look) -> float:
    """Share of all weights with a gradient that the update left as they were."""
    elements = 0
    lost = 0.0
    for one in trained(look):
        if one.lost is not None:
            elements += one.elements
            lost += one.lost * one.elements
    return lost / elements if elements else 0.0


RULE = Rule(code="SG901", recognise=recognise)
