"""SG920: weight decay that erases what is learned."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain

MOST = 0.1
"""Share of every weight that an update may take away."""
FEWEST = 4


def recognise(case: Case) -> Proof | None:
    if case.shrinks_by < MOST or len(case.recent) < FEWEST:
        return None
    return certain(
        f"learning rate times weight decay is {case.shrinks_by:.3g}: every update takes "
        f"{min(case.shrinks_by, 1.0):.0%} of every weight away, before anything is learned"
    )


RULE = Rule(code="SG920", recognise=recognise)
