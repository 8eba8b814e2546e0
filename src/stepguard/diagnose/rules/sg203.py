"""SG203: an exponential left the range."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import POWERS, singular_inputs
from stepguard.diagnose.case import Case, high, low, reach
from stepguard.diagnose.dtypes import exp_limit
from stepguard.diagnose.ops import EVEN, EXPONENTIALS
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Operand

POLYNOMIAL = 4
"""Powers up to here are products: it is the number that is too large, not its exponent."""
REPEATED_PRODUCTS = ("prod", "cumprod", "_linalg_matrix_exp", "linalg_matrix_exp", "matrix_exp")


def recognise(case: Case) -> Proof | None:
    if case.unselected or not case.makes_inf:
        return None
    exponent = case.argument("self", 0)
    # in any phase: people write exponentials into a backward of their own
    if case.op in EXPONENTIALS and exponent is not None and exponent.finite:
        return _exponential(case, exponent)
    if not case.computes:
        return None
    return _repeated_product(case) or _power(case)


def _exponential(case: Case, exponent: Operand) -> Proof | None:
    limit = exp_limit(case.dtype, case.op)
    largest = reach(exponent) if case.op in EVEN else high(exponent)
    # the limit is that of exact arithmetic, so a rounded operand may show just below it
    if not largest > limit * 0.99:
        return None
    grows = ""
    if case.op in EVEN:
        grows = "which grows as "
    numbers = (
        f"{case.place}: {grows}exp({spell(largest)}){at_index(exponent)} exceeds what "
        f"{case.dtype} can hold"
    )
    bound = f"in {case.dtype} the exponent may be at most {limit:.2f}; {describe(exponent)}"
    prove = certain
    if case.absorbed or case.narrow:
        prove = likely
    return prove(numbers, bound, case.confirmed_samples)


def _repeated_product(case: Case) -> Proof | None:
    base = case.argument("self", 0)
    if case.op not in REPEATED_PRODUCTS or base is None or not base.finite:
        return None
    if not case.wider or case.narrow:
        return None
    text = (
        f"{case.place}: repeated products of numbers up to {spell(reach(base))} exceed what "
        f"{case.dtype} can hold"
    )
    return likely(text, describe(base), case.confirmed_samples)


def _power(case: Case) -> Proof | None:
    base = case.argument("self", 0)
    exponent = case.argument("exponent", 1)
    if case.op not in POWERS or base is None or exponent is None or singular_inputs(case):
        return None
    if case.narrow or reach(exponent) <= POLYNOMIAL or low(exponent) < 0:
        return None
    text = (
        f"{case.place}: {spell(reach(base))} to the power {spell(high(exponent))} exceeds what "
        f"{case.dtype} can hold"
    )
    return likely(text, case.confirmed_samples)


RULE = Rule(code="SG203", recognise=recognise, yields_to=("SG301", "SG504", "SG601"))
