"""Which operand left the domain of an operation: shared by the rules on division, logarithm, root
and overflow.
"""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case, elements, has_zero, high, low, met, reach
from stepguard.diagnose.ops import COUNTED, CURVED, MEASURED, NORM_LAYERS, PRODUCTS, STATISTICS
from stepguard.records import Operand

DIVISIONS = {
    "div": ("other", 1),
    "true_divide": ("other", 1),
    "divide": ("other", 1),
    "floor_divide": ("other", 1),
}
DIVISIONS |= {"remainder": ("other", 1), "fmod": ("other", 1), "addcdiv": ("tensor2", 2)}
DIVISIONS |= {"reciprocal": ("self", 0), "rsqrt": ("self", 0)}
"""Operation -> which argument it divides by."""


def zero_divisor(case: Case) -> Operand | None:
    """The operand with a zero that is divided by."""
    if case.op in DIVISIONS:
        divisor = case.argument(*DIVISIONS[case.op])
        return divisor if has_zero(divisor) else None
    if case.op in ("pow", "float_power"):
        base, exponent = case.argument("self", 0), case.argument("exponent", 1)
        falls = exponent is not None and low(exponent) < 0
        return base if falls and has_zero(base) else None
    return None


LOGS: dict[str, tuple[str, int, float, float]] = {
    "log": ("self", 0, 0.0, math.inf),
    "log2": ("self", 0, 0.0, math.inf),
    "log10": ("self", 0, 0.0, math.inf),
    "log1p": ("self", 0, -1.0, math.inf),
    "xlogy": ("other", 1, 0.0, math.inf),
    "special_xlogy": ("other", 1, 0.0, math.inf),
    "special_xlog1py": ("other", 1, -1.0, math.inf),
    "special_entr": ("self", 0, 0.0, math.inf),
    "logit": ("self", 0, 0.0, 1.0),
    "special_ndtri": ("self", 0, 0.0, 1.0),
    "atanh": ("self", 0, -1.0, 1.0),
    "erfinv": ("self", 0, -1.0, 1.0),
    "lgamma": ("self", 0, 0.0, math.inf),
    "mvlgamma": ("self", 0, 0.0, math.inf),
    "digamma": ("self", 0, 0.0, math.inf),
    "special_digamma": ("self", 0, 0.0, math.inf),
    "polygamma": ("self", 1, 0.0, math.inf),
}
"""Operation -> argument, its position, and the open interval in which it is finite."""


def log_argument(case: Case) -> tuple[Operand, float, float] | None:
    """The operand of a logarithm that is at or beyond its pole, with the open interval it must stay
    in.
    """
    if case.op not in LOGS:
        return None
    name, position, least, most = LOGS[case.op]
    operand = case.argument(name, position)
    if operand is None or not (met(operand)[0] <= least or met(operand)[1] >= most):
        return None
    return operand, least, most


def negative_root(case: Case) -> tuple[Operand, str] | None:
    """The operand that has no real root or power, with what was asked of it."""
    operand = case.argument("self", 0)
    if case.op in NORM_LAYERS:
        variance = case.argument("running_var", 4)
        return (
            (variance, "root of a variance") if variance is not None and low(variance) < 0 else None
        )
    if operand is None or operand.nan:
        return None
    least, most = met(operand)
    if case.op in ("sqrt", "rsqrt") and least < 0:
        return operand, "square root"
    if case.op in ("pow", "float_power") and least < 0:
        exponent = case.argument("exponent", 1)
        if exponent is None or fractional(exponent):
            return operand, "power " + ("" if exponent is None else f"{high(exponent):g}")
    if case.op in ("acos", "asin") and max(abs(least), abs(most)) > 1:
        return (
            operand,
            f"{case.op}, which is real on [-1, 1] only: beyond, 1 - x*x is negative and has no "
            f"root",
        )
    if case.op == "acosh" and least < 1:
        return operand, "acosh, which is real from 1 on: below, x*x - 1 is negative and has no root"
    return None


def fractional(operand: Operand) -> bool:
    """Some element is no whole number, as far as its range shows."""
    return any(math.isfinite(v) and v != int(v) for v in (low(operand), high(operand)))


def singular_inputs(case: Case) -> bool:
    """The result is non-finite in any precision: a pole, a missing root, an infinity that came in."""
    out_of_domain = zero_divisor(case) or log_argument(case) or negative_root(case)
    return bool(out_of_domain) or not case.finite_inputs


def overflow(case: Case) -> bool:
    """Finite operands, a result out of range, and no pole in between: the numbers were simply too
    large.
    """
    if (
        not case.inputs
        or singular_inputs(case)
        or (case.op in STATISTICS and case.evidence.reduced_elements == 1)
    ):
        return False
    if any(elements(operand) == 0 for operand in case.inputs if operand.dtype):
        return False
    return case.op in PRODUCTS | NORM_LAYERS or bool(case.wider)


MASK_NAMES = ("mask", "label", "valid", "length")


def counts_nothing(case: Case, divisor: Operand) -> bool:
    """Is the zero divisor a count or a mask's sum, so that the mean runs over no element?"""
    made_by = (case.evidence.denominator_from or "").removeprefix("aten.").rstrip("_")
    if made_by in MEASURED | CURVED or case.op not in ("div", "true_divide", "reciprocal", "mul"):
        return False
    if low(divisor) < 0 or fractional(divisor) or case.evidence.denominator_fractional:
        return False  # counts are whole and never negative
    if case.evidence.denominator_learned:
        return False  # nor do they depend on weights
    root = (case.evidence.denominator_root or "").lower()
    whole_type = "int" in divisor.dtype or "bool" in divisor.dtype
    if whole_type or any(word in root for word in MASK_NAMES):
        return True
    nothing_above = (
        case.op == "reciprocal"
        or has_zero(case.argument("self", 0))
        or case.evidence.zero_numerator
    )
    whole = elements(divisor) > 1 and high(divisor) >= 1 and low(divisor) == 0
    if made_by in COUNTED:
        return (nothing_above or case.phase == "loss") and (whole or reach(divisor) == 0)
    if elements(divisor) == 1:
        return case.phase == "loss" and nothing_above and case.op == "div"
    return whole and nothing_above and case.op == "div"
