"""SG954: second moments that underflow."""

from __future__ import annotations

from collections.abc import Iterable

from stepguard.diagnose.ahead import Figure, Trend, log2, soonest
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, foretold
from stepguard.records.look import Look

SMALLEST = {"float16": -24.0, "bfloat16": -133.0, "float32": -149.0}
"""Binary logarithm of the smallest number that is not 0."""


def recognise(case: Case) -> Proof | None:
    return foretold(
        soonest(case.looks, TREND), "it is 0 from then on, and the update divides by nothing"
    )


def _figures(look: Look) -> Iterable[Figure]:
    for one in look.parameters:
        smallest = SMALLEST.get(one.dtype)
        if one.variance is None or smallest is None:
            continue
        # beside an epsilon that is larger than its root a second moment of 0 changes nothing
        covered = one.epsilon is None or one.epsilon**2 >= 2.0**smallest
        yield Figure(place=one.name, value=log2(one.variance), limit=smallest, near=not covered)


TREND = Trend(quantity="the smallest second moment", figures=_figures, rising=False)
RULE = Rule(code="SG954", recognise=recognise)
