"""SG917: gradients that float16 rounds to 0 for want of a loss scale."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import last_looks
from stepguard.records.look import Look, TensorLook

MOST_LOST = 0.2
"""Share of a gradient's elements that may be rounded to 0."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or any(reading.scale is not None for reading in case.recent):
        return None
    worst = [_worst(look) for look in looks]
    if any(one is None or one.rounded_away < MOST_LOST for one in worst):
        return None
    row = worst[-1]
    assert row is not None
    return likely(
        f"{row.rounded_away:.0%} of the gradient that goes into {row.module or 'the model'} at "
        f"step {looks[-1].step} is not 0 in float32 and 0 in float16, and no GradScaler scales the "
        "loss"
    )


def _worst(look: Look) -> TensorLook | None:
    rows = [one for one in look.tensors if one.stage == "backward" and one.dtype == "float16"]
    return max(rows, key=lambda one: one.rounded_away, default=None)


RULE = Rule(code="SG917", recognise=recognise)
