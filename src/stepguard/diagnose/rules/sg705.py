"""SG705: two ranks train on the same samples."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain


def recognise(case: Case) -> Proof | None:
    if case.verdict.kind != "same_data":
        return None
    said = case.verdict.evidence or {}
    samplers = ""
    if "samplers" in said:
        samplers = f"their samplers do not divide one order among them: {said['samplers']}"
    return certain(case.verdict.summary, samplers)


RULE = Rule(code="SG705", recognise=recognise, shown_by="record")
