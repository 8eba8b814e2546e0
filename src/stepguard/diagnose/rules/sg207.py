"""SG207: a root or fractional power of a negative number."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import negative_root
from stepguard.diagnose.case import Case, low
from stepguard.diagnose.rule import Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Remedy

ROUNDING = 1e-4
"""A value this little outside is a rounding error of something that should be inside."""


def _evidence(case: Case) -> Proof | None:
    found = negative_root(case)
    if found is None or not case.computes or case.unselected or not case.makes_nan:
        return None
    operand, what = found
    numbers = f"{case.place} asked for the {what}: {describe(operand)}"
    wrong = (
        f"the value that broke it is {spell(operand.value)}{at_index(operand)}"
        if operand.index is not None
        else ""
    )
    near = ""
    if case.op in ("sqrt", "rsqrt") and -ROUNDING < low(operand) < 0:
        near = f"{spell(low(operand))} is a rounding error below 0, as E[x*x] - E[x]*E[x] gives"
    return Proof(confidence=0.92, evidence=(numbers, wrong, near, case.confirmed_samples))


RULE = Rule(
    code="SG207",
    title="root or power of a negative value",
    what=prose(
        """
        A square root or a fractional power was taken of a negative number (or acos, asin, acosh outside their
        range, which is the same thing): the real result does not exist and torch returns NaN.
        """
    ),
    why=prose(
        """
        A difference that is mathematically non-negative came out as -1e-8 by rounding (variance as E[x*x] -
        E[x]*E[x], a cosine of 1.0000001), a learned scale lost its sign, or gamma correction met a negative
        pixel.
        """
    ),
    how=prose(
        """
        The operation is a root, a power with a fractional exponent, or an inverse cosine, and its operand has
        elements outside the domain.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Compute the quantity in a form that cannot turn negative",
            snippet=code(
                """
                variance = (x - x.mean()).pow(2).mean()
                loss = (variance + 1e-8).sqrt() * scale
                """
            ),
        ),
        Remedy(
            title="Clamp to the domain, a little inside it so that the gradient is finite too",
            snippet=code(
                """
                variance = x.pow(2).mean() - x.mean().pow(2)
                loss = variance.clamp_min(1e-8).sqrt() * scale
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        x = torch.full((6,), 100.1, requires_grad=True)  # constant: the variance is 0
        scale = torch.ones((), requires_grad=True)
        """
    ),
    bad=code(
        """
        variance = x.pow(2).mean() - x.mean().pow(2)  # -0.00098 by rounding
        loss = variance.sqrt() * scale
        """
    ),
    see=("pytorch/pytorch#76483",),
)
