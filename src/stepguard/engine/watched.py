"""The step of a watched loop, as far as it can be run again."""

from __future__ import annotations

from stepguard.engine.capture import Capture
from stepguard.engine.context import Context
from stepguard.engine.micro import MicroBatches
from stepguard.engine.overhear import Overheard
from stepguard.records import Reading
from stepguard.state.step import Step


def watched_step(
    context: Context, micro: MicroBatches, capture: Capture, heard: Overheard, reading: Reading | None
) -> Step:
    """Whole where a framework told its micro-batches, else the calls of the model, else only its number."""
    step = Step(context.step, context.model, context.optimizer, context.modules, context.buffers)
    if micro.complete(step, len(heard.losses)):
        step.clip_norm, step.grads_gone = context.config.clip_norm, heard.clipped
        step.scale = (reading.scale if reading is not None else None) or 1.0
        return step
    calls, step.model_fn = capture.calls, capture.model_fn()
    if step.model_fn is not None:
        # the gradients of the outputs already carry the loss scale, so the step's own scale stays 1
        step.micro_batches = tuple(call.as_batch() for call in calls)
        step.rng, step.lines = [call.rng for call in calls], tuple(call.line for call in calls)
    elif reading is not None:
        step.scale = reading.scale or 1.0
    return step
