"""SG803: nothing is learned."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.wording import spell


def recognise(case: Case) -> Proof | None:
    if case.verdict.kind not in ("zero_loss", "no_labels"):
        return None
    labels = ""
    if case.reading.labels == 0:
        labels = "0 targets of this step count"
    zero = f"loss is {spell(case.reading.loss)}, gradient norm is {spell(case.reading.grad_norm)}"
    return certain(labels, zero, case.verdict.summary)


RULE = Rule(code="SG803", recognise=recognise, shown_by="record")
