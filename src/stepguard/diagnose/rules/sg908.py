"""SG908: a loss that does not depend on what is trained."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.seen import last_looks, trained


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    for look in looks:
        rows = trained(look)
        if not rows or any(one.gradient_zeros < 1.0 for one in rows):
            return None
    loss = case.reading.loss
    if loss == 0.0:
        return None  # converged: the loss is all there is to lose
    return certain(
        f"every gradient is exactly 0 at steps {looks[0].step} and {looks[-1].step}"
        + (f", with a loss of {loss:.4g}" if loss is not None else "")
    )


RULE = Rule(code="SG908", recognise=recognise)
