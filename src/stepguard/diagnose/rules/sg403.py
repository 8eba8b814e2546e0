"""SG403: an infinity that forward swallowed and backward turned into NaN."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import DIVISIONS, LOGS, overflow
from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.ops import EXPONENTIALS, base_name
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.rules.sg202 import SATURATING
from stepguard.diagnose.wording import counts, describe

POLES = frozenset(DIVISIONS) | EXPONENTIALS | {"pow", "float_power", "tan", "cosh", "sinh"}


def recognise(case: Case) -> Proof | None:
    if case.unselected:
        return None
    if case.phase == "backward":
        return _in_backward(case)
    if not case.absorbed or not case.forward or not case.makes_inf:
        return None
    swallowed_by = base_name(case.evidence.absorbed_by)
    sentences = (*_numbers(case, swallowed_by), case.confirmed_samples)
    if _at_a_pole(case, swallowed_by):
        return certain(*sentences)
    if case.evidence.absorbed:
        return likely(*sentences)
    return None


def _at_a_pole(case: Case, swallowed_by: str) -> bool:
    """Does the operation itself reach infinity, rather than half precision overflow?"""
    if case.op in POLES:
        return not (case.short and overflow(case))
    return case.op in LOGS and swallowed_by in SATURATING


def _numbers(case: Case, swallowed_by: str) -> tuple[str, ...]:
    first = f"{case.place} makes an infinity in forward"
    made = ""
    if case.output is not None:
        made = counts(case.output, ("posinf", "neginf"))
    if made:
        first += f": {made}"
    by = ""
    if swallowed_by:
        by = f" ({swallowed_by})"
    then = f"a later operation{by} turns it into a finite number, backward multiplies it by 0"
    return first, then, _cause(case)


def _cause(case: Case) -> str:
    for operand in case.inputs:
        if has_zero(operand):
            return describe(operand)
    if case.inputs:
        return describe(case.inputs[0])
    return ""


def _in_backward(case: Case) -> Proof | None:
    infinite = next((operand for operand in case.inputs if operand.posinf or operand.neginf), None)
    text = f"{case.place} met a value that was infinite in forward although the loss is finite"
    if case.evidence.absorbed:
        return certain(text, describe(infinite), case.confirmed_samples)
    if infinite is None or not case.loss_finite or not _zero_meets_infinity(case):
        return None
    return likely(text, describe(infinite), case.confirmed_samples)


def _zero_meets_infinity(case: Case) -> bool:
    """0 * inf, and no NaN that came in from elsewhere."""
    if any(operand.nan for operand in case.inputs):
        return False
    return any(map(has_zero, case.inputs))


RULE = Rule(code="SG403", recognise=recognise)
