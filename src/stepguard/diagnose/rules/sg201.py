"""SG201: something was divided by zero."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import DIVISIONS, POWERS, counts_nothing, zero_divisor
from stepguard.diagnose.case import Case, has_zero, low, reach
from stepguard.diagnose.ops import NORM_LAYERS, words
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Operand

TINY = 1e-30
TINY_NUMBER = 1e-6
SOLVES = words(
    """
    linalg_solve_triangular triangular_solve linalg_solve _linalg_solve_ex linalg_solve_ex
    cholesky_solve linalg_inv linalg_inv_ex inverse linalg_lu_solve cholesky_inverse
    """
)


def recognise(case: Case) -> Proof | None:
    if case.phase == "optimizer":
        return _own_optimizer(case)
    if not case.forward or case.unselected:
        return None
    divisor = zero_divisor(case)
    if divisor is not None:
        return _by_zero(case, divisor)
    return _no_epsilon(case) or _inside(case) or _singular(case) or _tiny(case)


def _by_zero(case: Case, divisor: Operand) -> Proof:
    sentences = (*_numbers(case, divisor), case.confirmed_samples)
    # a mean over no element is SG102
    if counts_nothing(case, divisor):
        return possible(*sentences)
    # an infinity that the forward swallowed is SG403
    if case.absorbed and case.makes_inf:
        return likely(*sentences)
    return certain(*sentences)


def _own_optimizer(case: Case) -> Proof | None:
    """An update that divides without any epsilon; SG502 says what became of an epsilon."""
    divisor = zero_divisor(case)
    if divisor is None or case.facts.eps is not None or case.narrow:
        return None
    return certain(*_numbers(case, divisor))


def _numbers(case: Case, divisor: Operand) -> tuple[str, str]:
    form = "x / 0 is infinite"
    if case.op == "div" and has_zero(case.argument("self", 0)) and case.makes_nan:
        form = "0 / 0 = NaN"
    made_by = case.evidence.denominator_from
    source = ""
    if made_by:
        source = f"the divisor comes from {made_by}"
    return f"{case.place} divided by zero{at_index(divisor)} ({form}): {describe(divisor)}", source


def _no_epsilon(case: Case) -> Proof | None:
    eps = case.argument("eps", 7)
    if case.op not in NORM_LAYERS or not case.finite_inputs:
        return None
    if eps is None or eps.value is None or eps.value >= TINY:
        return None
    text = (
        f"{case.place} has eps={spell(eps.value)}: where all elements are equal the variance is "
        f"0 and is divided by"
    )
    return likely(text, case.confirmed_samples)


def _inside(case: Case) -> Proof | None:
    """An operator that divides by something it computes itself, as weight norm does by a norm."""
    # the divisor is not among the operands: only locating, which had the tensors, could see it
    if not case.evidence.zero_denominator or case.op in DIVISIONS:
        return None
    what = (case.evidence.denominator_from or "value").removeprefix("aten.")
    text = f"{case.place} divides by a {what} that is 0"
    return certain(text, *map(describe, case.inputs[:2]), case.confirmed_samples)


def _singular(case: Case) -> Proof | None:
    """Solving with a matrix divides by its pivots; of a triangular one, by its diagonal."""
    # solve_triangular calls its matrix `self`, the _ex variants call it `A`
    matrix = case.argument("self", 0) or case.argument("A", 0)
    if case.op not in SOLVES or matrix is None or not case.finite_inputs:
        return None
    text = (
        f"{case.place} divides by the diagonal or pivots of a matrix that is singular: "
        f"{describe(matrix)}"
    )
    return likely(text, case.confirmed_samples)


def _tiny(case: Case) -> Proof | None:
    """A quotient that overflows on a divisor near 0."""
    # in half precision a tiny divisor has been rounded to 0 before: SG302
    if case.short or not case.finite_inputs:
        return None
    found = _divisor(case)
    if found is None:
        return None
    divisor, least = found
    small = divisor.value if divisor.value is not None else low(divisor)
    if math.isnan(small) or not (abs(small) < least or _tiny_number(case, divisor)):
        return None
    text = (
        f"{case.place} divided by {spell(small)}{at_index(divisor)}: so small that the quotient "
        f"overflows"
    )
    return likely(text, case.confirmed_samples)


def _divisor(case: Case) -> tuple[Operand, float] | None:
    """What is divided by, and below which size the quotient overflows."""
    if case.op in POWERS:
        base = case.argument("self", 0)
        exponent = case.argument("exponent", 1)
        if base is None or exponent is None or not low(exponent) < 0:
            return None
        return base, TINY ** (-1 / low(exponent))
    if case.op not in ("div", "reciprocal", "rsqrt"):
        return None
    divisor = case.argument("other", 1) if case.op == "div" else case.argument("self", 0)
    if divisor is None:
        return None
    return (divisor, TINY)


def _tiny_number(case: Case, divisor: Operand) -> bool:
    """A Python number, such as a temperature near 0, that outweighs what it divides."""
    above = case.argument("self", 0)
    if case.op != "div" or above is None:
        return False
    if divisor.shape or divisor.dtype != "float" or not divisor.value:
        return False
    return abs(divisor.value) <= TINY_NUMBER and 1 / abs(divisor.value) >= reach(above)


RULE = Rule(code="SG201", recognise=recognise, yields_to=("SG207", "SG301", "SG302"))
