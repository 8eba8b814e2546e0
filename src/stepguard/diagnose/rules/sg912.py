"""SG912: a learning rate that is 0."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain

IN_A_ROW = 64


def recognise(case: Case) -> Proof | None:
    steps = case.recent[-IN_A_ROW:]
    if len(steps) < IN_A_ROW:
        return None
    if any(not reading.lr or any(reading.lr) for reading in steps):
        return None
    return certain(
        f"every learning rate has been 0 for the last {len(steps)} steps, up to step "
        f"{steps[-1].step}: nothing is learned"
    )


RULE = Rule(code="SG912", recognise=recognise)
