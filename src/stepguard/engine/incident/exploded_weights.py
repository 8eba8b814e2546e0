"""What an origin says about the weights: an overflow in float32 may only be where exploded ones
surface.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.records import Evidence, Origin, Reading

EXTREME = 1e15
"""Half of float32's exponent range: ordinary weights and data never get there."""
LOST = 1e6
"""Times an earlier batch has lost since it was new."""


def surfaces_only(origin: Origin | None) -> bool:
    """A wide number format overflowed on huge finite operands that no sample and no stored tensor
    explains.
    """
    if (
        origin is None
        or origin.phase not in ("forward", "loss", "backward")
        or origin.samples
        or origin.tensor
    ):
        return False
    if origin.evidence.half_precision or origin.evidence.finite_in is None:
        return False
    sizes = [
        abs(v)
        for o in origin.inputs
        for v in (o.min, o.max, o.value)
        if v is not None and math.isfinite(v)
    ]
    return all(o.finite for o in origin.inputs) and max(sizes, default=0.0) >= EXTREME


def stored_culprit(origin: Origin | None) -> bool:
    """A parameter or buffer was bad before the step: the next batch will fare no better.

    An entry of a table that is infinite on purpose hurts only the samples that look it up.
    """
    stored = ("param:", "buffer:")
    if origin is not None and origin.evidence.as_data:
        return False
    return (
        origin is not None and origin.phase == "state" and (origin.tensor or "").startswith(stored)
    )


def weights_ruined(origin: Origin | None) -> bool:
    """Has an earlier batch, fine in its time, been seen to fail on the present weights?"""
    return origin is not None and origin.evidence.weights_ruined


def ruined(again: tuple[float, float]) -> bool:
    """An earlier healthy batch, on the present weights and when it was new."""
    now, then = again
    return not math.isfinite(now) or now - then > LOST * max(abs(then), 1.0)


def blamed_on_update(origin: Origin, reading: Reading) -> Origin:
    """The origin as the update's doing, with the operation where it surfaced as a fact."""
    evidence = Evidence(weights_ruined=True, surfaced_at=origin.op, repeat_loss=reading.repeat_loss)
    return replace(
        origin,
        phase="optimizer",
        module=None,
        op=None,
        node=None,
        micro_batch=None,
        inputs=(),
        output=None,
        evidence=replace(origin.evidence, confounded_samples=False) | evidence,
    )
