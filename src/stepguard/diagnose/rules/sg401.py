"""SG401: the derivative is infinite where the function is fine."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow, zero_divisor
from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.diagnose.rules.sg202 import LOG_NODES
from stepguard.diagnose.wording import at_index, describe
from stepguard.records import Operand

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


def recognise(case: Case) -> Proof | None:
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


RULE = Rule(code="SG401", recognise=recognise, yields_to=("SG403",))
