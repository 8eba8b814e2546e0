"""SG504: the learning rate jumped."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import EXPONENTIALS
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.trends import lr_climb, lr_jump, lr_not_a_number
from stepguard.records import Certainty

FINITE_ANOMALIES = ("spike", "drift")
"""Verdicts on a step in which nothing is non-finite yet."""


def recognise(case: Case) -> Proof | None:
    # a rate of NaN makes every weight NaN, whatever else is true of the step
    group = lr_not_a_number(case)
    if group is not None:
        return certain(f"group {group} runs with lr {case.reading.lr[group]}")
    jump = lr_jump(case)
    if jump is None:
        return None
    sentences = (jump.sentence, *_consequence(case))
    return Proof(certainty=_certainty(case), sentences=sentences)


def _certainty(case: Case) -> Certainty:
    """How well the jump explains what was seen."""
    kind = case.verdict.kind
    if kind in (*FINITE_ANOMALIES, "infinite_norm") or case.evidence.weights_ruined:
        return "certain"
    # loaded state that brings the old rate back is SG802
    if kind == "lr_mismatch" and case.facts.resumed:
        return "likely"
    if kind == "lr_mismatch" or _weights_ran_away(case):
        return "certain"
    return "possible"


def _weights_ran_away(case: Case) -> bool:
    """A wide dtype overflowed, or nothing but the update is known to be bad."""
    # past exp(709) float64 overflows as well, so that no wider dtype is finite
    if overflow(case) or case.op in EXPONENTIALS:
        return not case.short
    return case.phase in ("", "optimizer") and not case.op


def _consequence(case: Case) -> tuple[str, ...]:
    climb = lr_climb(case)
    grown = ""
    if climb is not None and climb.runaway:
        grown = climb.sentence
    update = case.facts.update_ratio
    ratio = ""
    if update is not None:
        ratio = f"the last update changed the weights by {update:.3g} of their norm"
    return grown, case.verdict.summary, ratio


RULE = Rule(code="SG504", recognise=recognise, shown_by="record")
