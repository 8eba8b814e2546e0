"""SG904: no gradient below some layer."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely, possible
from stepguard.diagnose.seen import in_all, last_looks, named, trained
from stepguard.records.look import Look

FEWEST = 2
"""Parameters in a row without a gradient that make a cut."""
ENOUGH, LONG = 8, 32
"""Looks, and steps between the first and the last, after which a gradient would have come."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    cut = [_first_without_gradient(look) for look in looks]
    if not all(cut) or cut[0] != cut[-1]:
        return _nowhere(case)
    names = cut[-1]
    return likely(
        f"the gradient is exactly 0 for {named(names)}, the first parameters of the model, while "
        f"those behind have one (steps {looks[0].step} and {looks[-1].step})"
    )


def _nowhere(case: Case) -> Proof | None:
    """Parameters that no look has seen with a gradient, wherever they are in the model."""
    # without any gradient the loss is at fault (SG908), or there was nothing to learn
    looks = [look for look in case.looks if any(one.gradient for one in trained(look))]
    if len(looks) < ENOUGH or looks[-1].step - looks[0].step < LONG:
        return None
    names = in_all(looks, lambda look: set(look.facts.without_gradient))
    if not names:
        return None
    return possible(
        f"{named(names)} belong to the optimizer and had no gradient at any of the {len(looks)} "
        f"looks from step {looks[0].step} to step {looks[-1].step}: they are as they were made, or "
        "only decay"
    )


def _first_without_gradient(look: Look) -> list[str]:
    """The parameters before the first with a gradient, in the order of the model."""
    rows = [one for one in look.parameters if one.trainable and one.owned]
    found: list[str] = []
    for one in rows:
        sparse = one.gradient is None and one.name not in look.facts.without_gradient
        if sparse or (one.gradient is not None and one.gradient_zeros < 1.0):
            break
        found.append(one.name)
    # without any gradient the loss is at fault (SG908), not a layer
    if len(found) < FEWEST or len(found) == len(rows):
        return []
    return found


RULE = Rule(code="SG904", recognise=recognise)
