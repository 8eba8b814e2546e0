"""SG402: the branch that `where` did not take still sends a gradient back."""

from __future__ import annotations

from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.rules.sg204 import PAIR_NODES, SOFTMAX_NODES
from stepguard.diagnose.wording import describe
from stepguard.records import Operand

SENTENCE = (
    "the branch was not selected, but its gradient is 0 times the local slope, and 0 * inf "
    "= 0 * NaN = NaN"
)


def recognise(case: Case) -> Proof | None:
    if case.unselected:
        return _unselected(case)
    # a swallowed infinity, not a discarded NaN: SG403
    if case.phase != "backward" or not case.loss_finite or case.evidence.absorbed:
        return None
    return _discarded(case)


def _unselected(case: Case) -> Proof:
    shown = [operand for operand in case.inputs if operand.dtype]
    numbers = f"{case.place} computes a branch that `where` discards"
    # the slope of a log-sum over nothing but -inf is NaN whatever gradient comes in
    by_itself = case.node in SOFTMAX_NODES | PAIR_NODES
    prove = certain
    if by_itself:
        prove = likely
    return prove(numbers, SENTENCE, *map(describe, shown[:2]), case.confirmed_samples)


def _discarded(case: Case) -> Proof | None:
    """NaN can pass a finite loss only by being selected away: no function swallows it."""
    saved = next((operand for operand in case.inputs if operand.nan), None)
    gradient = _zero_gradient(case, saved)
    if saved is None or gradient is None:
        return None
    numbers = (
        f"{case.place} multiplied a gradient of 0 by a value that was NaN in forward "
        f"although the loss is finite"
    )
    zeros = ""
    if gradient.zeros:
        zeros = f"{gradient.zeros} elements of the incoming gradient are exactly 0"
    return likely(numbers, SENTENCE, describe(saved), zeros)


def _zero_gradient(case: Case, saved: Operand | None) -> Operand | None:
    for operand in case.inputs:
        if operand is not saved and has_zero(operand):
            return operand
    return None


RULE = Rule(code="SG402", recognise=recognise)
