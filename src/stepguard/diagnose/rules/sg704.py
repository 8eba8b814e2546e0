"""SG704: copies of one model no longer hold the same weights, or are not updated alike."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain


def recognise(case: Case) -> Proof | None:
    if case.verdict.kind != "replica_drift":
        return None
    said = case.verdict.evidence or {}
    ranks = said.get("ranks", "")
    agree = said.get("agree", "")
    same = f"ranks {ranks} had the same gradients bit for bit, so they are copies of one model"
    if agree:
        same = f"rank {ranks} had the gradients of rank {agree} bit for bit: copies of one model"
    weights = ""
    if "tensor" in said:
        weights = f"{said['parameters']} parameters differ, first `{said['tensor']}`"
    rates = ""
    if "rates" in said:
        rates = f"learning rates differ: {said['rates']}"
    who = ""
    if not agree:
        who = "no majority tells which of them is right: with three ranks or more it would be named"
    return certain(same, weights, rates, who)


RULE = Rule(code="SG704", recognise=recognise, shown_by="record")
