"""SG103: the batch is finite, but so large that the model overflows on it."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case, high
from stepguard.diagnose.dtypes import largest
from stepguard.diagnose.ops import EXPONENTIALS
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.diagnose.wording import limit_of, spell

EXTREME_INPUT = 1e6
"""A batch element no normalised data set has."""
OUTLIER = 1e4
"""Times the largest value of all other samples."""
EXTREME_OPERAND = 1e15
"""Half of float32's exponent range is gone: one more product overflows."""


def recognise(case: Case) -> Proof | None:
    if not case.forward and case.phase != "backward":
        return None
    if not overflow(case) and case.op not in EXPONENTIALS:
        return None
    numbers = (
        f"{case.place} overflowed: its operands reach {spell(case.magnitude)}, the limit is "
        f"{limit_of(case.dtype)}"
    )
    return _extreme_batch(case, numbers) or _extreme_operand(case, numbers)


def _batch_max(case: Case) -> float | None:
    return case.evidence.sample_max or case.evidence.batch_max


def _extreme_batch(case: Case, numbers: str) -> Proof | None:
    batch_max = _batch_max(case)
    if batch_max is None:
        return None
    others = case.evidence.others_max
    stands_out = others is not None and batch_max >= OUTLIER * max(others, 1.0)
    if not stands_out and batch_max < min(EXTREME_INPUT, largest(case.dtype)):
        return None
    first = f"the batch is finite but holds {spell(batch_max)}"
    if others is not None:
        first += f"; all other samples stay within {spell(others)}"
    return certain(first, numbers, case.confirmed_samples)


def _extreme_operand(case: Case, numbers: str) -> Proof | None:
    """The batch does not stand out; an operand does, and a sample or the weights made it."""
    # in float16 ordinary operands overflow (SG301), and so do exponentials (SG203)
    if case.narrow or case.op in EXPONENTIALS or not _extreme(case):
        return None
    if case.confirmed_samples and _batch_max(case) is None:
        return likely(numbers, case.confirmed_samples)
    return possible(numbers)


def _extreme(case: Case) -> bool:
    """Do the operands use up the exponent range? A cube overflows on what a square still holds."""
    power = None
    if case.op == "pow":
        power = case.argument("exponent", 1)
    times = 1.0
    if power is not None:
        times = max(1.0, high(power) / 2)
    # compared as logarithms, since the product itself may overflow
    return math.log(max(case.magnitude, 1.0)) * times >= math.log(EXTREME_OPERAND)


RULE = Rule(code="SG103", recognise=recognise)
