"""SG904: no gradient below some layer."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import last_looks, named
from stepguard.records.look import Look

FEWEST = 2
"""Parameters in a row without a gradient that make a cut."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    cut = [_first_without_gradient(look) for look in looks]
    if not all(cut) or cut[0] != cut[-1]:
        return None
    names = cut[-1]
    return likely(
        f"the gradient is exactly 0 for {named(names)}, the first parameters of the model, while "
        f"those behind have one (steps {looks[0].step} and {looks[-1].step})"
    )


def _first_without_gradient(look: Look) -> list[str]:
    """The parameters before the first with a gradient, in the order of the model."""
    rows = [one for one in look.parameters if one.trainable and one.owned]
    found: list[str] = []
    for one in rows:
        if one.gradient_zeros < 1.0 and one.gradient is not None:
            break
        found.append(one.name)
    # without any gradient the loss is at fault (SG908), not a layer
    if len(found) < FEWEST or len(found) == len(rows):
        return []
    return found


RULE = Rule(code="SG904", recognise=recognise)
