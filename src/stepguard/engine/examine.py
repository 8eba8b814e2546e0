"""The closer look, once the cheap reading is alarming: which tensors are bad, and is it only the loss scale."""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.engine.context import Context
from stepguard.records import Reading
from stepguard.sentinel.gradients import finite
from stepguard.sentinel.stored import bad_buffers, bad_parameters, bad_slots, parameter_names
from stepguard.state.batch import bad_batch_tensors
from stepguard.state.replay import rerun
from stepguard.state.step import Step

LOWEST_SCALE = 2.0**-24


def examine(context: Context, step: Step, reading: Reading) -> Reading:
    """Name what is bad. Reads everything stored, so it is slow and only for bad steps."""
    if reading.state_born:
        return reading  # the update was looked at and taken back: what it made bad is named already
    if not reading.grads_finite and _losses_finite(reading) and overflows_by_scale(step, reading.scale or step.scale):
        return replace(reading, overflow=True, bad_state=())
    buffers_after = bad_buffers(context.roots, context.sentinels)
    if not buffers_after and _only_buffers(reading) and reading.bad_state == ("buffers",) and not reading.alarm:
        return replace(reading, bad_state=())  # a buffer that was infinite on purpose was written again
    step.buffers.restore()
    before = stored_trouble(context)
    made_now = buffers_after if not before and _only_buffers(reading) else []
    return replace(
        reading,
        bad_state=tuple(before or made_now),
        state_born=reading.state_born or bool(made_now),
        bad_inputs=tuple(bad_batch_tensors(step.micro_batches)),
        bad_grads=tuple(_bad_gradients(context)),
    )


def stored_trouble(context: Context) -> list[str]:
    """Parameters, buffers and optimizer slots that are non-finite now."""
    return [
        *bad_parameters(context.roots, context.optimizer),
        *bad_buffers(context.roots, context.sentinels),
        *bad_slots(context.optimizer),
    ]


def overflows_by_scale(step: Step, scale: float) -> bool:
    """Is the same step finite without the loss scale? Then the scale is the only fault."""
    if scale == 1.0:
        return False
    if not step.whole:
        return scale > 1.0  # cannot be run again: a scale above 1 is presumed to be calibrating
    return rerun(step, scale=1.0).grads_finite


def working_scale(step: Step) -> float:
    """The largest power-of-two fraction of the static scale at which this step is finite."""
    scale = step.scale / 2
    while scale > LOWEST_SCALE and not rerun(step, scale=scale).grads_finite:
        scale /= 2
    return scale


def _losses_finite(reading: Reading) -> bool:
    return reading.loss is None or (math.isfinite(reading.loss) and not reading.bad_micro_batches)


def _only_buffers(reading: Reading) -> bool:
    """Nothing else is wrong: this step's forward made a buffer non-finite."""
    return reading.grads_finite and _losses_finite(reading) and "buffers" in reading.bad_state


def _bad_gradients(context: Context) -> list[str]:
    names = parameter_names(context.roots, context.optimizer)
    return [name for p, name in names if p.grad is not None and not finite(p.grad)]
