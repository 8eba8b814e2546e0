"""SG401 to SG403: only the gradient is bad."""

from __future__ import annotations

from functools import cache

from stepguard.diagnose.case import EXPONENTIALS, Case, base_name
from stepguard.diagnose.rule import (
    DIVISIONS,
    LOGS,
    POWERS,
    Found,
    certain,
    likely,
    overflow,
    possible,
    rule,
    rule_text,
    zero_divisor,
)
from stepguard.diagnose.rules.sg200 import LOG_NODES, PAIR_NODES, SATURATING, SOFTMAX_NODES
from stepguard.records import Operand

# --- SG401: the derivative is infinite where the function is fine.


@cache
def _slopes() -> dict[str, str]:
    """Autograd node -> what is wrong with its slope, from the page."""
    slopes = {}
    for line in rule_text("SG401").evidence["slopes"]:
        nodes, _, sentence = line.partition(": ")
        slopes.update(dict.fromkeys(nodes.split(), sentence))
    return slopes


@rule(yields_to="SG403")
def sg401(case: Case) -> Found:
    if not case.backward or case.unselected:
        return None
    zero = zero_divisor(case)
    slope = _slopes().get(case.node)
    if slope is None:
        # a node without a slope on the page, such as a custom Function
        if zero is not None and case.finite_inputs:
            return likely("divides", zero=zero)
        if overflow(case) and not case.narrow:
            return possible("explodes")
        return None
    return _slope(case, slope, zero)


def _slope(case: Case, slope: str, zero: Operand | None) -> Found:
    # the zero the gradient is divided by, rather than a gradient that happens to be zero: backward
    # formulas put the incoming gradient first, as in grad / (2 * result)
    zeros = [operand for operand in case.zeros if operand.dtype]
    if zero is None and zeros:
        zero = zeros[-1]
    # a slope that a wider dtype can hold is SG301
    if zero is None and case.short and case.wider:
        return None
    prove = certain
    if not case.finite_inputs:
        prove = possible
    elif zero is None or case.node in LOG_NODES:
        # of a logarithm SG202 says more
        prove = likely
    return prove("slope", slope=slope, zero=zero)


# --- SG402: the branch that `where` did not take still sends a gradient back.


@rule()
def sg402(case: Case) -> Found:
    if case.unselected:
        shown = tuple(operand for operand in case.inputs if operand.dtype)
        # the slope of a log-sum over nothing but -inf is NaN whatever gradient comes in
        prove = likely if case.node in SOFTMAX_NODES | PAIR_NODES else certain
        return prove("unselected", shown=shown)
    # an absorbed infinity, not a discarded NaN: SG403
    if not case.backward or not case.loss_finite or case.evidence.absorbed:
        return None
    # NaN can pass a finite loss only by being selected away: no function absorbs it
    saved = next((operand for operand in case.inputs if operand.nan), None)
    for operand in case.zeros:
        if saved is not None and operand is not saved:
            return likely("discarded", saved=saved, zeros=operand.zeros or None)
    return None


# --- SG403: an infinity that forward absorbed and backward turned into NaN.


POLES = frozenset(DIVISIONS) | EXPONENTIALS | {*POWERS, "tan"}


@rule()
def sg403(case: Case) -> Found:
    evidence = case.evidence
    if case.unselected:
        return None
    if case.backward:
        return _met_infinity(case)
    if not case.absorbed or not case.forward or not case.makes_inf:
        return None
    absorbed_by = base_name(evidence.absorbed_by)
    fields = {"absorbed_by": absorbed_by, "operands": (*case.zeros, *case.inputs)}
    # the operation itself reaches infinity, rather than half precision overflow
    at_pole = case.op in LOGS and absorbed_by in SATURATING
    if case.op in POLES:
        at_pole = not (case.short and overflow(case))
    if at_pole:
        return certain("forward", **fields)
    if evidence.absorbed:
        return likely("forward", **fields)
    return None


def _met_infinity(case: Case) -> Found:
    infinite = next((one for one in case.inputs if one.posinf or one.neginf), None)
    if case.evidence.absorbed:
        return certain("backward", infinite=infinite)
    # 0 * inf, and no NaN that came in from elsewhere
    if infinite is None or not case.zeros or any(one.nan for one in case.inputs):
        return None
    if case.loss_finite:
        return likely("backward", infinite=infinite)
    return None
