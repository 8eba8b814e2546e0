"""Which operand left the domain of an operation: division, logarithm, root and overflow."""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case, elements, has_zero, high, low, met, reach
from stepguard.diagnose.ops import (
    COUNTED,
    CURVED,
    MEASURED,
    NLL,
    NORM_LAYERS,
    PRODUCTS,
    STATISTICS,
    base_name,
)
from stepguard.records import Operand

DIVISIONS = {
    "div": ("other", 1),
    "true_divide": ("other", 1),
    "divide": ("other", 1),
    "floor_divide": ("other", 1),
    "remainder": ("other", 1),
    "fmod": ("other", 1),
    "addcdiv": ("tensor2", 2),
    "reciprocal": ("self", 0),
    "rsqrt": ("self", 0),
}
"""Operation -> which argument it divides by."""
POWERS = ("pow", "float_power")
MASK_NAMES = ("mask", "label", "valid", "length")

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


def zero_divisor(case: Case) -> Operand | None:
    """The operand with a zero that is divided by."""
    if case.op in DIVISIONS:
        name, position = DIVISIONS[case.op]
        divisor = case.argument(name, position)
        if has_zero(divisor):
            return divisor
        return None
    if case.op not in POWERS:
        return None
    base = case.argument("self", 0)
    exponent = case.argument("exponent", 1)
    divides = exponent is not None and low(exponent) < 0
    if divides and has_zero(base):
        return base
    return None


def log_argument(case: Case) -> tuple[Operand, float, float] | None:
    """The operand of a logarithm at or beyond its pole, with the open interval it must stay in."""
    if case.op not in LOGS:
        return None
    name, position, least, most = LOGS[case.op]
    operand = case.argument(name, position)
    if operand is None:
        return None
    smallest, largest = met(operand)
    if smallest <= least or largest >= most:
        return operand, least, most
    return None


def negative_root(case: Case) -> tuple[Operand, str] | None:
    """The operand that has no real root or power, with what was asked of it."""
    if case.op in NORM_LAYERS:
        variance = case.argument("running_var", 4)
        if variance is None or not low(variance) < 0:
            return None
        return variance, "root of a variance"
    operand = case.argument("self", 0)
    if operand is None or operand.nan:
        return None
    asked = _asked_beyond_domain(case, operand)
    if asked:
        return (operand, asked)
    return None


def _asked_beyond_domain(case: Case, operand: Operand) -> str:
    """What was asked of an operand outside its domain; empty where it is inside."""
    least, most = met(operand)
    if case.op in ("sqrt", "rsqrt") and least < 0:
        return "square root"
    if case.op in POWERS and least < 0:
        return _fractional_power(case)
    if case.op in ("acos", "asin") and max(abs(least), abs(most)) > 1:
        return (
            f"{case.op}, which is real on [-1, 1] only: beyond, 1 - x*x is negative and has no root"
        )
    if case.op == "acosh" and least < 1:
        return "acosh, which is real from 1 on: below, x*x - 1 is negative and has no root"
    return ""


def _fractional_power(case: Case) -> str:
    exponent = case.argument("exponent", 1)
    if exponent is None:
        return "power "
    if fractional(exponent):
        return f"power {high(exponent):g}"
    return ""


def fractional(operand: Operand) -> bool:
    """Some element is not a whole number, as far as its range shows."""
    ends = (low(operand), high(operand))
    return any(math.isfinite(end) and end != int(end) for end in ends)


def singular_inputs(case: Case) -> bool:
    """The result is non-finite in any precision: a pole, a missing root, an infinite operand."""
    out_of_domain = zero_divisor(case) or log_argument(case) or negative_root(case)
    return bool(out_of_domain) or not case.finite_inputs


def overflow(case: Case) -> bool:
    """Finite operands and no pole in between: the numbers were too large for the result."""
    if not case.inputs or singular_inputs(case):
        return False
    if case.op in STATISTICS and case.evidence.reduced_elements == 1:
        return False
    if any(operand.dtype and elements(operand) == 0 for operand in case.inputs):
        return False
    return case.op in PRODUCTS | NORM_LAYERS or bool(case.wider)


def counts_nothing(case: Case, divisor: Operand) -> bool:
    """Is the zero divisor a count or a mask's sum, so that the mean runs over no element?"""
    if case.op not in ("div", "true_divide", "reciprocal", "mul") or _cannot_count(case, divisor):
        return False
    root = (case.evidence.denominator_root or "").lower()
    whole_type = "int" in divisor.dtype or "bool" in divisor.dtype
    if whole_type or any(word in root for word in MASK_NAMES):
        return True
    return _looks_like_count(case, divisor)


def _cannot_count(case: Case, divisor: Operand) -> bool:
    """Counts are whole, never negative, and depend on no weights."""
    evidence = case.evidence
    if base_name(evidence.denominator_from) in MEASURED | CURVED:
        return True
    if evidence.denominator_fractional or evidence.denominator_learned:
        return True
    return low(divisor) < 0 or fractional(divisor)


def _looks_like_count(case: Case, divisor: Operand) -> bool:
    """Nothing excludes a count: do the values, and what is divided, speak for one?"""
    in_loss = case.phase == "loss"
    if base_name(case.evidence.denominator_from) in COUNTED:
        all_zero = reach(divisor) == 0
        return (in_loss or _nothing_above(case)) and (_counts_rows(divisor) or all_zero)
    if case.op != "div" or not _nothing_above(case):
        return False
    if elements(divisor) == 1:
        # transformers divides the summed cross entropy inside the model, by a count of its own
        return in_loss or base_name(case.evidence.numerator_from) in NLL
    return _counts_rows(divisor)


def _counts_rows(divisor: Operand) -> bool:
    """Several numbers, of which some are 0 and some are not."""
    return elements(divisor) > 1 and high(divisor) >= 1 and low(divisor) == 0


def _nothing_above(case: Case) -> bool:
    """Is what is divided 0 too, as the sum over no element is?"""
    if case.op == "reciprocal" or case.evidence.zero_numerator:
        return True
    return has_zero(case.argument("self", 0))
