"""SG202: the logarithm of zero or of a negative number."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import log_argument
from stepguard.diagnose.case import Case, has_zero, low
from stepguard.diagnose.ops import base_name, words
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.wording import broken_by, describe, spell

LOG_NODES = words("Log Log1P Log2 Log10 Logit")
DETERMINANTS = words("_linalg_slogdet linalg_slogdet _linalg_det linalg_det")
LOG_DETERMINANTS = ("_linalg_slogdet", "linalg_slogdet", "logdet")
SATURATING = words(
    "exp erf tanh sigmoid atan clamp clamp_max clamp_min reciprocal div softmax _softmax"
)


def recognise(case: Case) -> Proof | None:
    if case.unselected:
        return None
    if case.phase == "backward":
        return _gradient(case)
    return _determinant(case) or _logarithm(case)


def _determinant(case: Case) -> Proof | None:
    if case.op in LOG_DETERMINANTS and case.makes_inf:
        return certain(f"{case.place} took the logarithm of a determinant that is 0")
    # logdet answers a negative determinant with a NaN constant, chosen by `where`
    if case.op == "where" and base_name(case.evidence.chosen_by) in DETERMINANTS:
        return certain(f"{case.place}: the determinant is negative and has no logarithm")
    return None


def _logarithm(case: Case) -> Proof | None:
    found = log_argument(case)
    if found is None or not case.computes:
        return None
    operand, least, most = found
    allowed = f"between {spell(least)} and {spell(most)}"
    if math.isinf(most):
        allowed = f"above {spell(least)}"
    numbers = f"{case.place} needs a value {allowed}: {describe(operand)}"
    swallowed = base_name(case.evidence.absorbed_by) in SATURATING
    prove = certain
    if swallowed:
        prove = likely
    return prove(numbers, broken_by(operand), case.confirmed_samples)


def _gradient(case: Case) -> Proof | None:
    # log's backward is grad / x, in which the operand that forward saved is the divisor
    if case.node not in LOG_NODES:
        return None
    for operand in case.inputs:
        if has_zero(operand) or low(operand) < 0:
            numbers = (
                f"{case.place} divides the gradient by the logarithm's argument, which is 0: "
                f"{describe(operand)}"
            )
            return likely(numbers, case.confirmed_samples)
    return None


RULE = Rule(code="SG202", recognise=recognise, yields_to=("SG104", "SG301", "SG302"))
