"""Tell exploded weights from a bad operation: float32 overflows where exploded weights surface."""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.records import Evidence, Operand, Origin, Reading

EXTREME = 1e15
"""Half of float32's exponent range: ordinary weights and data never get there."""
LOST = 1e6
"""Times the loss of an earlier batch must have grown since it was new."""


def surfaces_only(origin: Origin | None) -> bool:
    """Did float32 overflow on huge finite operands that no sample or stored tensor explains?"""
    if origin is None or origin.phase not in ("forward", "loss", "backward"):
        return False
    if origin.samples or origin.tensor:
        return False
    if origin.evidence.half_precision or origin.evidence.finite_in is None:
        return False
    if not all(operand.finite for operand in origin.inputs):
        return False
    return any(_largest(operand) >= EXTREME for operand in origin.inputs)


def _largest(operand: Operand) -> float:
    """The largest finite magnitude that is known of an operand; 0 where none is."""
    largest = 0.0
    for value in (operand.min, operand.max, operand.value):
        if value is not None and math.isfinite(value):
            largest = max(largest, abs(value))
    return largest


def stored_culprit(origin: Origin | None) -> bool:
    """Was a parameter or buffer bad before the step? Then the next batch meets it as well."""
    if origin is None or origin.phase != "state" or origin.tensor is None:
        return False
    # an entry of a table that is infinite on purpose hurts only the samples that look it up
    if origin.evidence.as_data:
        return False
    return origin.tensor.startswith(("param:", "buffer:"))


def weights_ruined(origin: Origin | None) -> bool:
    """Has an earlier batch, fine in its time, been seen to fail on the present weights?"""
    return origin is not None and origin.evidence.weights_ruined


def exploded(again: tuple[float, float]) -> bool:
    """Has the loss of an earlier healthy batch exploded? `again`: its loss now and when new."""
    now, then = again
    if not math.isfinite(now):
        return True
    return now - then > LOST * max(abs(then), 1.0)


def blamed_on_update(origin: Origin, reading: Reading) -> Origin:
    """Blame the update, and keep the operation where it surfaced as a fact."""
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
