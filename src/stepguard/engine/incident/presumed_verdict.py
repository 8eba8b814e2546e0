"""What a cheap reading proves by itself, for when the closer look or the verdict fails by a fault
of our own.

A step whose loss or gradient is not finite is known to be bad before anything has been looked at:
it stays vetoed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.engine.context import Context
from stepguard.records import Reading, Verdict
from stepguard.records.verdict import OK

UNNAMED = "param:unnamed"


def presumed_reading(context: Context, reading: Reading) -> Reading:
    """The reading without a closer look. Buffers may be non-finite on purpose, so they prove
    nothing.
    """
    stored = (UNNAMED,) if "state" in reading.bad_state else ()
    by_scale = context.scaling() and not reading.grads_finite and _losses_finite(reading)
    return replace(reading, bad_state=() if by_scale else stored, overflow=by_scale)


def presumed_verdict(context: Context, reading: Reading) -> Verdict:
    """For a verdict that could not be reached: what is proven to be bad is refused, all else goes
    on.
    """
    if reading.state_born:
        return Verdict(
            kind="nonfinite_parameter",
            severity="incident",
            summary=f"{reading.bad_state[0]} was born bad",
        )
    seen = presumed_reading(context, reading)
    if seen.overflow:
        return Verdict(
            kind="scale_calibration",
            severity="note",
            summary="gradients overflow at the present scale",
        )
    if not _losses_finite(seen):
        return Verdict(kind="nonfinite_loss", severity="incident", summary=f"loss is {seen.loss}")
    if not seen.grads_finite:
        return Verdict(
            kind="nonfinite_gradient", severity="incident", summary="gradient is non-finite"
        )
    if seen.grad_norm is not None and not math.isfinite(seen.grad_norm):
        return Verdict(
            kind="infinite_norm", severity="incident", summary="the norm of the gradients overflows"
        )
    if seen.bad_state:
        return Verdict(
            kind="nonfinite_parameter", severity="incident", summary="stored state is not finite"
        )
    return OK


def _losses_finite(reading: Reading) -> bool:
    losses = (reading.loss, *reading.micro_losses)
    return all(loss is None or math.isfinite(loss) for loss in losses)
