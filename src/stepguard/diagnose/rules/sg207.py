"""SG207: a root or fractional power of a negative number."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import negative_root
from stepguard.diagnose.case import Case, low
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.wording import broken_by, describe, spell

ROUNDING = 1e-4
"""A value this little outside is a rounding error of something that should be inside."""


def recognise(case: Case) -> Proof | None:
    found = negative_root(case)
    if found is None or not case.computes or case.unselected or not case.makes_nan:
        return None
    operand, what = found
    # a variance computed as a difference of means cancels to a small negative number
    near = ""
    if case.op in ("sqrt", "rsqrt") and -ROUNDING < low(operand) < 0:
        near = f"{spell(low(operand))} is a rounding error below 0, as E[x*x] - E[x]*E[x] gives"
    numbers = f"{case.place} asked for the {what}: {describe(operand)}"
    return certain(numbers, broken_by(operand), near, case.confirmed_samples)


RULE = Rule(code="SG207", recognise=recognise, yields_to=("SG301", "SG502", "SG602"))
