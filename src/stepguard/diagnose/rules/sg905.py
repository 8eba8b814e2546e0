"""SG905: units behind an activation that are dead."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import in_all, last_looks, named
from stepguard.records.look import Look

MOST_DEAD = 0.9
LEAST_POSITIONS = 256
"""Samples and positions that a unit must have been 0 at to be called dead."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    dead = in_all(looks, _dead)
    if not dead:
        return None
    worst = max((one for one in looks[-1].units if one.module in dead), key=lambda one: one.dead)
    return likely(
        f"{worst.dead:.0%} of the {worst.units} units behind {worst.op.removeprefix('aten.')} in "
        f"{worst.module or 'the model'} are 0 for all {worst.positions:,} samples and positions of "
        f"step {looks[-1].step}",
        f"the same in {named(dead)}" if len(dead) > 1 else "",
    )


def _dead(look: Look) -> set[str]:
    found = set()
    for one in look.units:
        if one.dead >= MOST_DEAD and one.positions >= LEAST_POSITIONS:
            found.add(one.module)
    return found


RULE = Rule(code="SG905", recognise=recognise)
