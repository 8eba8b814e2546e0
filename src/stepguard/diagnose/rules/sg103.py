"""SG103: the batch is finite, but so large that the model overflows on it, or the loss jumps."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case, high
from stepguard.diagnose.dtypes import exp_limit, largest
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
    outlier = outlier_of(case)
    if outlier:
        return likely(outlier)
    if not case.forward and case.phase != "backward":
        return None
    if not overflow(case) and case.op not in EXPONENTIALS:
        return None
    numbers = f"{case.place} overflowed: its operands reach {spell(case.magnitude)}, {_limit(case)}"
    return _extreme_batch(case, numbers) or _extreme_operand(case, numbers)


def _limit(case: Case) -> str:
    """What the operation can take, where that is known; else what its result can hold."""
    power = case.argument("exponent", 1)
    most = largest(case.dtype)
    if case.op in EXPONENTIALS:
        name = case.op.removeprefix("special_")
        return f"{name} takes at most {exp_limit(case.dtype, case.op):.1f} in {case.dtype}"
    if case.op == "square" or (case.op == "pow" and power is not None and high(power) > 1):
        times = 2.0 if power is None else high(power)
        return f"power {times:g} takes at most {most ** (1.0 / times):.3g} in {case.dtype}"
    return f"and the result may be at most {limit_of(case.dtype)}"


def outlier_of(case: Case) -> str:
    """What stands out in the batch of a loss that jumped, in words; empty where nothing does."""
    if not case.verdict.finite_anomaly:
        return ""
    if case.origin is not None and case.evidence.loss_without is not None:
        with_it, without = case.evidence.loss_with, case.evidence.loss_without
        return f"without {case.origin.culprits} the loss is {without:.6g} instead of {with_it:.6g}"
    return str((case.verdict.evidence or {}).get("outlier", ""))


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
    if case.evidence.huge_buffer or case.evidence.huge_parameter:
        # where the magnitude comes from is known, and it is not the data
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
