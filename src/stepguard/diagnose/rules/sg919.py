"""SG919: units or outputs that are all alike."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, possible
from stepguard.diagnose.seen import in_all, last_looks, named
from stepguard.records.look import Look

ENOUGH_LOOKS = 3
LASTING, LONG = 6, 48
"""Looks and steps after which a model that gives one answer has collapsed."""
COLLAPSED = 1e-3
"""Deviation of the outputs between samples, beside their size and beside that of the beginning."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case, ENOUGH_LOOKS)
    copies = in_all(looks, _copies)
    if copies:
        return certain(
            f"all units of {named(copies)} have the same weights and get the same gradients at "
            f"steps {looks[0].step} to {looks[-1].step}: they stay copies of one unit"
        )
    return _collapsed(case)


def _collapsed(case: Case) -> Proof | None:
    """Outputs that have stayed the same for all samples: for a while they may, on a plateau."""
    looks = last_looks(case, LASTING)
    first = case.looks[0].facts.spread if case.looks else None
    spreads = [look.facts.spread for look in looks]
    if not first or not spreads or any(spread is None for spread in spreads):
        return None
    if looks[-1].step - looks[0].step < LONG:
        return None
    most = max(spread or 0.0 for spread in spreads)
    if first < COLLAPSED or most > COLLAPSED * min(1.0, first):
        return None
    return possible(
        f"the outputs of different samples differ by {most:.1g} of their size at steps "
        f"{looks[0].step} to {looks[-1].step} ({first:.1g} at step {case.looks[0].step}): the "
        "model gives every sample the same answer"
    )


def _copies(look: Look) -> set[str]:
    return {one.name for one in look.parameters if one.copies and one.owned}


RULE = Rule(code="SG919", recognise=recognise)
