"""SG302: a small number that half precision rounds to zero."""

from __future__ import annotations

from stepguard.diagnose.case import FORMATS, NORM_LAYERS, Case, base_name, rounds_to_zero, words
from stepguard.diagnose.rule import (
    Proof,
    Rule,
    certain,
    describe,
    limit_of,
    log_argument,
    overflow,
    possible,
    spell,
    zero_divisor,
)
from stepguard.records import Operand

# --- SG301: a result beyond the range of half precision.


EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
SIGNS = {"add": "+", "mul": "*", "div": "/"}


def recognise_sg301(case: Case) -> Proof | None:
    if case.overflows_by_scale:
        return _static_scale(case)
    if not case.inputs or case.unselected or not case.short:
        return None
    # micro-batches are added up in the gradient's own dtype
    if case.node == "AccumulateGrad" and case.finite_inputs:
        return _accumulated(case)
    if _left_the_range(case):
        return _result(case)
    return None


def _left_the_range(case: Case) -> bool:
    """Is it the range of half precision, and not the operation, that made the infinity?"""
    if case.op in EXPONENTIALS:
        # bfloat16 has the range of float32: there the exponent is too large, SG203
        return case.narrow and bool(case.wider)
    if not case.narrow and not case.wider:
        return False
    return overflow(case) or _backward(case)


def _backward(case: Case) -> bool:
    """Gradients of any operation overflow half precision as long as nothing was divided by zero."""
    if case.phase != "backward" or not case.finite_inputs:
        return False
    return zero_divisor(case) is None and bool(case.wider)


def _result(case: Case) -> Proof:
    shown = [operand for operand in case.inputs if operand.dtype and operand.max is not None]
    limit = (
        f"{case.place} has finite operands but a result beyond {limit_of(case.dtype)}{_sum(case)}"
    )
    wider = ""
    if case.wider:
        wider = f"computed in {case.wider} the same operation is finite"
    return certain(limit, *map(describe, shown[:3]), wider, case.confirmed_samples)


def _sum(case: Case) -> str:
    """The very numbers that met, where the operation is simple enough to write down."""
    values = [operand.value for operand in case.inputs if operand.value is not None]
    if case.op not in SIGNS or len(values) < 2:
        return ""
    return f": {spell(values[0])} {SIGNS[case.op]} {spell(values[1])}"


def _accumulated(case: Case) -> Proof:
    which = ""
    if case.origin is not None and case.origin.micro_batch is not None:
        which = f" of micro-batch {case.origin.micro_batch + 1}"
    text = (
        f"adding the gradient{which} to those before it exceeds {limit_of(case.dtype)}; each of "
        f"them is finite"
    )
    return certain(text, *map(describe, case.inputs[:2]))


def _static_scale(case: Case) -> Proof:
    scale = spell(case.reading.scale)
    text = f"the gradients overflow at loss scale {scale} and are finite at scale 1"
    stays = ""
    if case.facts.scaling == "static" or case.verdict.kind == "nonfinite_gradient":
        stays = "the scale is static: skipping the step cures nothing, the next one overflows too"
    # a scale that has collapsed is below 1: then SG506 knows more
    prove = certain
    if case.verdict.kind == "scaler_collapse":
        prove = possible
    return prove(text, stays, remedies=SG301.text.special)


SG301 = Rule(
    code="SG301",
    recognise=recognise_sg301,
    yields_to=("SG103", "SG402", "SG403", "SG501", "SG502", "SG504", "SG505", "SG703"),
)


# --- SG302: a small number that half precision rounds to zero.


GUARDS = words("add clamp clamp_min maximum rsub addcmul")
"""Operations people keep a number above 0 with: x + eps, clamp_min(eps), 1 - t."""


def recognise_sg302(case: Case) -> Proof | None:
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


SG302 = Rule(code="SG302", recognise=recognise_sg302)
