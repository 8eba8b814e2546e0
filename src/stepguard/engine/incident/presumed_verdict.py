"""Judge by the cheap reading alone, where the closer look or the verdict failed by our own fault.

A step whose loss or gradient is not finite is known to be bad before anything else was read: it
stays vetoed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.engine.context import Context
from stepguard.records import Reading, Verdict
from stepguard.records.verdict import OK, VerdictKind

UNNAMED = "param:unnamed"


def presumed_reading(context: Context, reading: Reading) -> Reading:
    """The reading without a closer look. A bad buffer may be meant, so it proves nothing."""
    if context.scaling() and not reading.grads_finite and _losses_finite(reading):
        return replace(reading, bad_state=(), overflow=True)
    stored = (UNNAMED,) if "state" in reading.bad_state else ()
    return replace(reading, bad_state=stored, overflow=False)


def presumed_verdict(context: Context, reading: Reading) -> Verdict:
    """Refuse what is proven to be bad, and let everything else pass."""
    if reading.state_born:
        return _bad("nonfinite_parameter", f"{reading.bad_state[0]} was born bad")
    seen = presumed_reading(context, reading)
    if seen.overflow:
        return Verdict(
            kind="scale_calibration",
            severity="note",
            summary="gradients overflow at the present scale",
        )
    if not _losses_finite(seen):
        return _bad("nonfinite_loss", f"loss is {seen.loss}")
    if not seen.grads_finite:
        return _bad("nonfinite_gradient", "gradient is non-finite")
    if seen.grad_norm is not None and not math.isfinite(seen.grad_norm):
        return _bad("infinite_norm", "the norm of the gradients overflows")
    if seen.bad_state:
        return _bad("nonfinite_parameter", "stored state is not finite")
    if seen.alarm:
        # all ranks have the same alarm: if one let the step pass, their weights would part
        return _bad("nonfinite_gradient", "a rank has read something that is not finite")
    if not all(map(math.isfinite, seen.lr)):
        return _bad("lr_mismatch", f"the learning rate is {seen.lr}")
    return OK


def _bad(kind: VerdictKind, summary: str) -> Verdict:
    return Verdict(kind=kind, severity="incident", summary=summary)


def _losses_finite(reading: Reading) -> bool:
    losses = (reading.loss, *reading.micro_losses)
    return all(loss is None or math.isfinite(loss) for loss in losses)
