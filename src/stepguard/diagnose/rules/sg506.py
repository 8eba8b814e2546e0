"""SG506: the loss scale fell below 1 and still the gradients overflow."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, possible
from stepguard.diagnose.wording import spell


def recognise(case: Case) -> Proof | None:
    scale = case.reading.scale
    # a GradScaler halves its scale at every overflow and never stops by itself
    collapsed = case.verdict.kind == "scaler_collapse"
    if not collapsed and (scale is None or scale >= 1.0 or case.reading.grads_finite):
        return None
    prove = possible
    if collapsed and not case.operated:
        prove = certain
    return prove(
        f"the loss scale is {spell(scale)}, below 1, and the gradients are still not finite",
        "the scale is therefore not what makes them overflow: every step is skipped and the "
        "weights never move",
    )


RULE = Rule(code="SG506", recognise=recognise, shown_by="record")
