"""SG301: a result beyond the range of half precision."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow, zero_divisor
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, possible
from stepguard.diagnose.wording import describe, limit_of, spell

EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
SIGNS = {"add": "+", "mul": "*", "div": "/"}


def recognise(case: Case) -> Proof | None:
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
    return prove(text, stays, remedies=RULE.text.special)


RULE = Rule(
    code="SG301",
    recognise=recognise,
    yields_to=("SG103", "SG402", "SG403", "SG501", "SG502", "SG504", "SG505", "SG703"),
)
