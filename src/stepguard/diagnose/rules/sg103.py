"""SG103: the batch is finite, but so large that the model overflows on it."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case, high
from stepguard.diagnose.dtypes import largest
from stepguard.diagnose.ops import EXPONENTIALS
from stepguard.diagnose.rule import HINT, PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.wording import limit_of, spell
from stepguard.records import Remedy

EXTREME_INPUT = 1e6
"""A batch element no normalised data set has."""
OUTLIER = 1e4
"""Times the largest value of all other samples."""
EXTREME_OPERAND = 1e15
"""Half of float32's exponent range is gone: one more product overflows."""


def _evidence(case: Case) -> Proof | None:
    if not (case.forward or case.phase == "backward") or not (
        overflow(case) or case.op in EXPONENTIALS
    ):
        return None
    batch_max = case.evidence.sample_max or case.evidence.batch_max
    numbers = (
        f"{case.place} overflowed: its operands reach {spell(case.magnitude)}, the limit is "
        f"{limit_of(case.dtype)}"
    )
    others = case.evidence.others_max
    stands_out = bool(batch_max and others is not None and batch_max >= OUTLIER * max(others, 1.0))
    if batch_max is not None and (
        stands_out or batch_max >= min(EXTREME_INPUT, largest(case.dtype))
    ):
        first = f"the batch is finite but holds {spell(batch_max)}"
        first += f"; all other samples stay within {spell(others)}" if others is not None else ""
        return Proof(confidence=0.94, evidence=(first, numbers, case.confirmed_samples))
    if case.narrow or case.op in EXPONENTIALS or not _extreme(case):
        return None
    if case.confirmed_samples and batch_max is None:
        return Proof(confidence=0.8, evidence=(numbers, case.confirmed_samples))
    return Proof(confidence=PLAUSIBLE if batch_max is None else HINT, evidence=(numbers,))


def _extreme(case: Case) -> bool:
    """Compared as logarithms, for a higher power overflows on less: a cube on what a square still
    holds.
    """
    power = case.argument("exponent", 1) if case.op == "pow" else None
    times = max(1.0, high(power) / 2) if power is not None else 1.0
    return math.log(max(case.magnitude, 1.0)) * times >= math.log(EXTREME_OPERAND)


RULE = Rule(
    code="SG103",
    title="extreme finite input overflows downstream",
    what=prose(
        """
        The batch holds a finite value so large that an operation further on leaves the range of its dtype.
        """
    ),
    why=prose(
        """
        A fill value for missing data (1e20, 9.97e36), a raw time stamp or identifier used as a feature, a
        wrong unit, a sensor glitch, or normalisation that was skipped. Squaring needs only 1.8e19 to overflow
        float32.
        """
    ),
    how=prose(
        """
        The operation overflowed on finite operands without a pole in between, and the batch itself holds an
        extreme value, or leaving out one sample makes the step finite. If no sample stands out and the losses
        were rising, it is SG505 instead.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Treat the fill value as missing and leave those samples out",
            snippet=code(
                """
                valid = features.abs().amax(dim=1) < 1e6
                loss = (features[valid] @ weight - target[valid]).pow(2).mean()  # log (~valid).sum()
                """
            ),
        ),
        Remedy(
            title="Clip features to the range seen in training data, after normalising them",
            snippet=code(
                """
                low, high = -10.0, 10.0  # for instance the 0.1 and 99.9 percentiles of the training set
                loss = (features.clamp(low, high) @ weight - target).pow(2).mean()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        features = torch.tensor([[0.5, 1.0], [0.3, 1e20], [0.1, 0.2]])
        target = torch.zeros(3)
        weight = torch.ones(2, requires_grad=True)
        """
    ),
    bad="loss = (features @ weight - target).pow(2).mean()",
    see=("https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",),
)
