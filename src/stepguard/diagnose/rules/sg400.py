"""SG401: the derivative is infinite where the function is fine."""

from __future__ import annotations

from stepguard.diagnose.case import EXPONENTIALS, Case, base_name, has_zero
from stepguard.diagnose.rule import (
    DIVISIONS,
    LOGS,
    Proof,
    Rule,
    at_index,
    certain,
    counts,
    describe,
    likely,
    overflow,
    possible,
    zero_divisor,
)
from stepguard.diagnose.rules.sg200 import LOG_NODES, PAIR_NODES, SATURATING, SOFTMAX_NODES
from stepguard.records import Operand

# --- SG401: the derivative is infinite where the function is fine.


SINGULAR = {
    "Sqrt": "sqrt(x) at x = 0 has slope 1 / (2 sqrt(x)), which is infinite",
    "Rsqrt": "1 / sqrt(x) near x = 0 has slope -x**-1.5 / 2",
    "Pow": "x**g at x = 0 with g < 1 has slope g * x**(g - 1), which is infinite",
    "Acos": "acos(x) at x = 1 or -1 has slope -1 / sqrt(1 - x*x), which is infinite",
    "Asin": "asin(x) at x = 1 or -1 has slope 1 / sqrt(1 - x*x), which is infinite",
    "Acosh": "acosh(x) at x = 1 has slope 1 / sqrt(x*x - 1), which is infinite",
    "Atanh": "atanh(x) at x = 1 or -1 has slope 1 / (1 - x*x), which is infinite",
    "Atan2": "atan2(0, 0) has no slope: it divides by x*x + y*y = 0",
    "Angle": "the angle of 0 has no slope: it divides by |z| = 0",
    "Hypot": "hypot(0, 0) has no slope: it divides by the result 0",
    "Erfinv": "erfinv(x) at x = 1 or -1 has an infinite slope",
    "Reciprocal": "1 / x near x = 0 has slope -1 / x**2, which overflows long before 1 / x does",
    "Div": "a / b has slope -a / b**2 in b, which overflows long before a / b does",
    "Cumprod": "cumprod divides by its input, which is 0",
    "Prod": "prod divides by its input, which is 0",
    "WeightNormInterface": "weight norm divides by the norm of a row, which is 0",
    "Xlogy": "x log y at x = y = 0 is 0, but its slope in y is x / y = 0 / 0",
    "SpecialXlog1Py": "x log(1 + y) at x = 0, y = -1 is 0, but its slope in y is 0 / 0",
    "SpecialEntr": "-p log p at p = 0 is 0, but its slope is -log(p) - 1, which is infinite",
    "CosineSimilarity": "the cosine similarity of a zero vector has no slope",
}
SINGULAR |= dict.fromkeys(
    [
        "Norm",
        "LinalgVectorNorm",
        "LinalgNorm",
        "LinalgMatrixNorm",
        "Dist",
        "Cdist",
        "Pdist",
        "EuclideanDist",
        "Renorm",
    ],
    "the norm of a zero vector has no slope: it divides by the norm",
)
SINGULAR |= dict.fromkeys(
    ["LinalgEigh", "LinalgEig", "LinalgSvd", "Svd", "SymEig", "LinalgEigvalsh"],
    "eigenvectors of equal eigenvalues have no slope: it divides by their difference, which is 0",
)
SINGULAR |= dict.fromkeys(
    [
        "LinalgQr",
        "LinalgInvEx",
        "LinalgSolveEx",
        "LinalgCholeskyEx",
        "LinalgDet",
        "LinalgSlogdet",
        "Cholesky",
        "LinalgPinv",
    ],
    "the slope divides by a diagonal or pivot that is 0: the matrix is singular",
)
SINGULAR |= dict.fromkeys(
    ("Std", "StdMean"),
    "the slope of a standard deviation of 0 is infinite: it divides by the deviation",
)
SINGULAR |= dict.fromkeys(
    LOG_NODES | {"Lgamma"}, "the slope of a logarithm is 1 / x, which is infinite at 0"
)


def recognise_sg401(case: Case) -> Proof | None:
    if case.phase != "backward" or case.unselected:
        return None
    if case.node not in SINGULAR:
        return _divides(case) or _explodes(case)
    zero = _singular_operand(case)
    # a slope that a wider dtype can hold is SG301
    if zero is None and case.short and case.wider:
        return None
    return _slope(case, zero)


def _slope(case: Case, zero: Operand | None) -> Proof:
    numbers = f"born in {case.place}"
    if zero is not None:
        numbers = f"{case.place} met it{at_index(zero)}: {describe(zero)}"
    forward = ""
    if case.loss_finite:
        forward = "the forward value is finite, only its slope is not"
    sentences = (SINGULAR[case.node], numbers, forward, case.confirmed_samples)
    if not case.finite_inputs:
        return possible(*sentences)
    # of a logarithm SG202 says more
    if zero is None or case.node in LOG_NODES:
        return likely(*sentences)
    return certain(*sentences)


def _singular_operand(case: Case) -> Operand | None:
    """The zero the gradient is divided by, rather than a gradient that happens to be zero."""
    divisor = zero_divisor(case)
    if divisor is not None:
        return divisor
    # backward formulas put the incoming gradient first, as in grad / (2 * result)
    for operand in reversed(case.inputs):
        if operand.dtype and has_zero(operand):
            return operand
    return None


def _divides(case: Case) -> Proof | None:
    """A gradient divided by 0 in a node without an entry above, such as a custom Function."""
    zero = zero_divisor(case)
    if zero is None or not case.finite_inputs:
        return None
    text = f"{case.place} divides the gradient by 0{at_index(zero)}: {describe(zero)}"
    return likely(text, case.confirmed_samples)


def _explodes(case: Case) -> Proof | None:
    if not overflow(case) or case.narrow:
        return None
    text = (
        f"{case.place}: the gradient grew beyond {case.dtype} on its way back; operands reach "
        f"{case.magnitude:.3g}"
    )
    return possible(text, case.confirmed_samples)


SG401 = Rule(code="SG401", recognise=recognise_sg401, yields_to=("SG403",))


# --- SG402: the branch that `where` did not take still sends a gradient back.


SENTENCE = (
    "the branch was not selected, but its gradient is 0 times the local slope, and 0 * inf "
    "= 0 * NaN = NaN"
)


def recognise_sg402(case: Case) -> Proof | None:
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


SG402 = Rule(code="SG402", recognise=recognise_sg402)


# --- SG403: an infinity that forward swallowed and backward turned into NaN.


POLES = frozenset(DIVISIONS) | EXPONENTIALS | {"pow", "float_power", "tan", "cosh", "sinh"}


def recognise_sg403(case: Case) -> Proof | None:
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


SG403 = Rule(code="SG403", recognise=recognise_sg403)
