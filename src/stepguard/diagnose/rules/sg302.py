"""SG302: a small number that half precision rounds to zero."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import log_argument, zero_divisor
from stepguard.diagnose.case import Case
from stepguard.diagnose.dtypes import FORMATS, rounds_to_zero
from stepguard.diagnose.ops import NORM_LAYERS, base_name, words
from stepguard.diagnose.rule import Proof, Rule, certain, possible
from stepguard.diagnose.wording import describe, spell
from stepguard.records import Operand

GUARDS = words("add clamp clamp_min maximum rsub addcmul")
"""Operations people keep a number above 0 with: x + eps, clamp_min(eps), 1 - t."""


def recognise(case: Case) -> Proof | None:
    if not case.short or case.phase == "optimizer" or case.unselected:
        return None
    zero = _zero(case)
    proof = _epsilon_underflows(case, zero) or _norm_layer(case)
    if proof is not None or zero is None:
        return proof
    return _epsilon_vanished(case, zero) or _rounded(case, zero)


def _zero(case: Case) -> Operand | None:
    """The zero that was divided by, or whose logarithm was taken."""
    divisor = zero_divisor(case)
    if divisor is not None:
        return divisor
    found = log_argument(case)
    if found is not None and found[0].zeros:
        return found[0]
    return None


def _epsilon_underflows(case: Case, zero: Operand | None) -> Proof | None:
    if not case.evidence.eps_underflow:
        return None
    eps = case.evidence.eps
    which = "the epsilon"
    if eps is not None:
        which = f"eps={spell(eps)}"
    first = f"{which} is 0 in {case.dtype}, whose smallest positive number is {_smallest(case)}"
    consequence = ""
    if zero is not None:
        consequence = _consequence(case, zero)
    return certain(first, consequence, case.confirmed_samples)


def _norm_layer(case: Case) -> Proof | None:
    # a norm layer takes its eps as a Python number, so it is an operand of its own
    if case.op not in NORM_LAYERS:
        return None
    for operand in case.inputs:
        if operand.name == "eps" and rounds_to_zero(operand.value or 0.0, case.dtype):
            first = f"{case.place} has eps={spell(operand.value)}, which is 0 in {case.dtype}"
            return certain(first, f"the smallest positive number there is {_smallest(case)}")
    return None


def _epsilon_vanished(case: Case, zero: Operand) -> Proof | None:
    vanished = case.evidence.eps_vanished
    if vanished is None:
        return None
    first = (
        f"{spell(vanished)}, on the way to this operand, is 0 in {case.dtype}: "
        f"{_smallest(case)} is its smallest"
    )
    return certain(first, _consequence(case, zero), case.confirmed_samples)


def _rounded(case: Case, zero: Operand) -> Proof:
    """A zero that a wider dtype, or the epsilon people added, would have kept above 0."""
    made_by = base_name(case.evidence.denominator_from or case.evidence.argument_from)
    guarded = ""
    if made_by in GUARDS:
        guarded = f"the 0 comes from {made_by}, which was to keep it above 0"
    rounded = (
        f"in {case.dtype} everything up to {_smallest(case)} / 2 is 0, and next to 1 "
        f"everything below {_ulp(case)}"
    )
    prove = possible
    if case.wider or guarded:
        prove = certain
    return prove(_consequence(case, zero), guarded, rounded, case.confirmed_samples)


def _consequence(case: Case, zero: Operand) -> str:
    return f"{case.place} then met an exact 0: {describe(zero)}"


def _smallest(case: Case) -> str:
    return f"{FORMATS[case.dtype].smallest:.3g}"


def _ulp(case: Case) -> str:
    return f"{2.0 ** -FORMATS[case.dtype].bits:.3g}"


RULE = Rule(code="SG302", recognise=recognise)
