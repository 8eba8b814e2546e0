"""SG205: the standard deviation or variance of a single element."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import STATISTICS, words
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.wording import describe, spell
from stepguard.records import Operand

STATISTIC_NODES = words("Std Var StdMean VarMean")
SQUARES_OVERFLOW = 1e18


def recognise(case: Case) -> Proof | None:
    data = case.argument("self", 0)
    if data is None or not data.finite:
        return None
    if case.evidence.reduced_elements == 1:
        return _measured(case, data)
    return _by_shape(case, data)


def _measured(case: Case, data: Operand) -> Proof | None:
    """Locating has counted one element."""
    if case.op not in STATISTICS and case.node not in STATISTIC_NODES:
        return None
    return certain(*_sentences(case, data))


def _by_shape(case: Case, data: Operand) -> Proof | None:
    """NaN from finite elements whose squares do not overflow: n - correction was 0."""
    if case.op not in STATISTICS or not case.makes_nan:
        return None
    if case.magnitude > SQUARES_OVERFLOW or case.wider:
        return None
    if _single(data):
        return certain(*_sentences(case, data))
    return likely(*_sentences(case, data))


def _sentences(case: Case, data: Operand) -> tuple[str, ...]:
    # torch's default is the unbiased statistic, which divides by n - 1
    divisor = case.argument("correction", 2)
    correction = 1.0
    if divisor is not None and divisor.value is not None:
        correction = divisor.value
    numbers = (
        f"{case.place} reduced 1 element with correction={spell(correction)}: it divides by "
        f"n - correction = 0"
    )
    return numbers, describe(data), case.confirmed_samples


def _single(data: Operand) -> bool:
    return not data.shape or 1 in data.shape or 0 in data.shape


RULE = Rule(code="SG205", recognise=recognise, yields_to=("SG402",))
