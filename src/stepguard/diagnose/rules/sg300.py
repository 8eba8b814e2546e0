"""SG301 and SG302: half precision."""

from __future__ import annotations

from stepguard.diagnose.case import (
    FORMATS,
    NORM_LAYERS,
    Case,
    base_name,
    plain,
    rounds_to_zero,
    words,
)
from stepguard.diagnose.rule import (
    Found,
    Proof,
    certain,
    limit_of,
    log_argument,
    overflow,
    possible,
    rule,
    zero_divisor,
)
from stepguard.records import Operand

# --- SG301: a result beyond the range of half precision.


EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
SIGNS = {"add": "+", "mul": "*", "div": "/"}


@rule(yields_to="SG103 SG209 SG402 SG403 SG501 SG502 SG504 SG505 SG703")
def sg301(case: Case) -> Found:
    if case.overflows_by_scale:
        static = case.facts.scaling == "static" or case.verdict.kind == "nonfinite_gradient"
        # a scale that has collapsed is below 1: then SG506 knows more
        prove = possible if case.verdict.kind == "scaler_collapse" else certain
        return prove("scale", static=static)
    if not case.inputs or case.unselected or not case.short:
        return None
    # micro-batches are added up in the gradient's own dtype
    accumulated = case.node == "AccumulateGrad" and case.finite_inputs
    if accumulated or _left_the_range(case):
        return _too_large(case, accumulated)
    return None


def _too_large(case: Case, accumulated: bool) -> Proof:
    stored = case.tensor.removeprefix("param:")
    given = plain(case.inputs[0].dtype)
    micro_batches = len(case.reading.micro_losses)
    fields = {
        "limit": limit_of(case.dtype),
        "parameter": next(iter(case.reading.bad_grads), stored),
        "micro_batches": micro_batches if micro_batches > 1 else None,
        "cast": None,
    }
    if accumulated:
        number = case.where.micro_batch
        return certain("accumulated", number=None if number is None else number + 1, **fields)
    if case.op == "_to_copy":
        fields["cast"] = given if given in FORMATS else "float32"
    shown = [operand for operand in case.inputs if operand.dtype and operand.max is not None]
    # the very numbers that met, where the operation is simple enough to write down
    values = [operand.value for operand in case.inputs if operand.value is not None]
    sign = SIGNS.get(case.op)
    return certain("result", shown=tuple(shown), values=tuple(values), sign=sign, **fields)


def _left_the_range(case: Case) -> bool:
    """Is it the range of half precision, and not the operation, that made the infinity?"""
    if case.op in EXPONENTIALS:
        # bfloat16 has the range of float32: there the exponent is too large, SG203
        return case.narrow and bool(case.wider)
    if not case.narrow and not case.wider:
        return False
    # gradients of any operation overflow as long as nothing was divided by zero
    gradient = case.backward and case.finite_inputs and bool(case.wider)
    return overflow(case) or (gradient and zero_divisor(case) is None)


# --- SG302: a small number that half precision rounds to zero.


GUARDS = words("add clamp clamp_min maximum rsub addcmul")
"""Operations people keep a number above 0 with: x + eps, clamp_min(eps), 1 - t."""


@rule()
def sg302(case: Case) -> Found:
    if not case.short or case.in_update or case.unselected:
        return None
    # the zero that was divided by, or whose logarithm was taken
    zero = zero_divisor(case)
    logarithm = log_argument(case)
    if zero is None and logarithm is not None and logarithm[0].zeros:
        zero = logarithm[0]
    return _lost_epsilon(case, zero)


def _lost_epsilon(case: Case, zero: Operand | None) -> Found:
    evidence = case.evidence
    known = FORMATS[case.dtype]
    # a norm layer takes its eps as a Python number, so it is an operand of its own
    eps = next((operand.value for operand in case.inputs if operand.name == "eps"), None)
    lost = eps if evidence.eps_vanished is None else evidence.eps_vanished
    fields = {
        "zero": zero,
        "smallest": known.smallest,
        "lost_epsilon": lost if case.narrow else None,
    }
    if evidence.eps_underflow:
        return certain("epsilon underflows", **fields)
    if case.op in NORM_LAYERS and rounds_to_zero(eps or 0.0, case.dtype):
        return certain("norm layer", eps=eps, **fields)
    if zero is None:
        return None
    if evidence.eps_vanished is not None:
        return certain("epsilon vanished", **fields)
    # a zero that a wider dtype, or the epsilon people added, would have kept above 0
    made_by = base_name(evidence.denominator_from or evidence.argument_from)
    guard = made_by if made_by in GUARDS else None
    prove = certain if case.wider or guard else possible
    return prove("rounded", guard=guard, ulp=2.0**-known.bits, **fields)
