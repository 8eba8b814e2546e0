"""The closer look, once the cheap reading is alarming: which tensors are bad, and is it only the
loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from stepguard.engine.context import Context
from stepguard.locate.impurity import kept_loss_function_state
from stepguard.records import Origin, Reading
from stepguard.sentinel.gradients import dense_real, finite, gradient_norm
from stepguard.sentinel.rank_agreement import RankFault
from stepguard.sentinel.stored_tensors import (
    bad_buffers,
    bad_parameters,
    bad_slots,
    norm_statistics,
    parameter_names,
    state_tensors,
)
from stepguard.state.batch import bad_batch_tensors
from stepguard.state.replay import gradients_came_back_finite, kept_buffers, model_finite, rerun
from stepguard.state.step import Step

LOWEST_SCALE = 2.0**-24
LOOK_CLOSER_AFTER = 4
"""Overflows in a row after which it is no longer presumed that a scaler is calibrating."""
FAR_BELOW = 2.0**-10
"""Of a scale that overflows: where the step must be finite if the scale is all that is wrong."""


def examine(context: Context, step: Step, reading: Reading) -> Reading:
    """Name what is bad. Reads everything stored, so it is slow and only for bad steps."""
    if reading.state_born:
        return reading  # found after the update, which has been undone since
    if (
        not reading.grads_finite
        and _losses_finite(reading)
        and overflows_by_scale(context, step, reading)
    ):
        return replace(reading, overflow=True, bad_state=())
    buffers_after = [
        name for name in bad_buffers(context.roots) if name not in context.on_purpose()
    ]
    with kept_buffers(context.roots.values()):
        step.buffers.restore()
        before = stored_trouble(context)
    made_now = buffers_after if not before and _only_buffers(context, reading) else []
    if not buffers_after:
        leave_out_sentinels(context)
    return replace(
        reading,
        bad_state=tuple(before or made_now),
        state_born=reading.state_born or bool(made_now),
        bad_inputs=tuple(bad_batch_tensors(step.micro_batches)),
        bad_grads=tuple(_bad_gradients(context, step)),
    )


def stored_trouble(context: Context) -> list[str]:
    """Parameters, buffers and optimizer slots that are non-finite now and should not be."""
    found = [
        *bad_parameters(context.roots, context.optimizer, _elsewhere(context)),
        *bad_buffers(context.roots),
        *bad_slots(context.optimizer),
    ]
    return [name for name in found if name not in context.on_purpose()]


def _elsewhere(context: Context) -> set[int]:
    """Ids of parameters that somebody else trains: data to this guard, but for a look before its
    first update.
    """
    return context.ownership.elsewhere() if context.history.committed else set()


def somebody_elses(context: Context, origin: Origin | None) -> Origin | None:
    """A parameter that another optimizer trains has gone bad: data to this guard, and going back
    cures nothing.
    """
    if origin is None or origin.phase != "state" or not (origin.tensor or "").startswith("param:"):
        return origin
    elsewhere = _elsewhere(context)
    names = {
        f"param:{name}"
        for p, name in parameter_names(context.roots, context.optimizer)
        if id(p) in elsewhere
    }
    return replace(origin, notes=(*origin.notes, "as_data")) if origin.tensor in names else origin


def born_in_update(context: Context) -> list[str]:
    """What an update has just made non-finite. A finite norm of it all proves that there is nothing
    to look for.
    """
    stored = (*context.parameters, *state_tensors(context.optimizer))
    looked = [dense_real(t).detach() for t in stored if id(t) not in context.ignored]
    norm = gradient_norm([t for t in looked if t.is_floating_point()])
    return [] if norm is None or bool(torch.isfinite(norm.total)) else stored_trouble(context)


def bad_tensors(model: nn.Module) -> tuple[str, ...]:
    """Non-finite parameters and norm statistics of a model that nothing else is known of."""
    statistics = {id(buffer) for buffer in norm_statistics({"": model})}
    parameters = [f"param:{name}" for name, p in model.named_parameters() if not finite(p)]
    buffers = [
        f"buffer:{name}"
        for name, b in model.named_buffers()
        if id(b) in statistics and not finite(b)
    ]
    return tuple(parameters + buffers)


def agreed_trouble(context: Context, *, together: bool) -> tuple[str, ...]:
    """`stored_trouble` of this rank, or of all ranks if all of them ask now."""
    if not together:
        return tuple(stored_trouble(context))
    try:
        everybody = context.agreement.together(lambda: {"bad": stored_trouble(context)})
    except RankFault:  # a rank whose guard has disarmed itself does not take part
        return tuple(stored_trouble(context))
    return tuple(dict.fromkeys(name for told in everybody for name in told["bad"]))


def accept(context: Context, names: Iterable[str]) -> None:
    """The policy goes on with state that was bad from the start: it is not looked at again."""
    context.accepted.update(names)
    stored = [
        *context.parameters,
        *norm_statistics(context.roots),
        *state_tensors(context.optimizer),
    ]
    context.ignored.update(id(tensor) for tensor in stored if not finite(tensor))


def leave_out_sentinels(context: Context) -> None:
    """Buffers that are non-finite on purpose and are written again and again: the cheap look need
    not see them.
    """
    written = context.buffers.written()
    context.ignored.update(id(buffer) for buffer in written if not finite(buffer))


def overflows_by_scale(context: Context, step: Step, reading: Reading) -> bool:
    """Is the same step finite with a lower loss scale? Then the scale is the only fault."""
    scale = reading.scale or step.scale
    if context.scaling() and _usual_for_a_scaler(context, scale, reading.grad_norm):
        return True
    with kept_loss_function_state(step):
        return _finite_at_a_lower_scale(context, step, scale)


def _usual_for_a_scaler(context: Context, scale: float, norm: float | None) -> bool:
    """A scaler that tries a higher scale overflows now and then: a healthy run is not run again for
    that.

    An overflow leaves infinities, so the norm is infinite. A NaN may have been born as one, so it
    is looked into, and so is a scale that keeps falling.
    """
    if context.overflows_in_a_row >= LOOK_CLOSER_AFTER:
        return False
    worked = context.worked_scale
    higher_than_ever = worked is not None and scale > worked
    return higher_than_ever or (norm is not None and math.isinf(norm))


def _finite_at_a_lower_scale(context: Context, step: Step, scale: float) -> bool:
    if not context.scaling():
        return step.scale != 1.0 and step.replayable and rerun(step, scale=1.0).grads_finite
    if step.model_only:
        # the loss's own backward cannot be run again: gradients that come back from it infinite are
        # the scale's
        return model_finite(step, scale=scale) or not gradients_came_back_finite(step)
    if not step.replayable:
        return True  # cannot be run again: a scaler that still falls is presumed to be calibrating
    return rerun(step, scale=min(1.0, step.scale * FAR_BELOW)).grads_finite


def working_scale(step: Step) -> float:
    """Half the largest power-of-two fraction of the static scale at which this step is finite:
    others may be larger.
    """
    scale = step.scale / 2
    while scale > LOWEST_SCALE and not rerun(step, scale=scale).grads_finite:
        scale /= 2
    return scale / 2


def _losses_finite(reading: Reading) -> bool:
    return reading.loss is None or (math.isfinite(reading.loss) and not reading.bad_micro_batches)


def _only_buffers(context: Context, reading: Reading) -> bool:
    """Nothing else is wrong: this step's forward made a buffer non-finite."""
    # where gradients carry a rank's own trouble to the others, theirs are non-finite because of it
    grads_fine = reading.grads_finite or context.agreement.mode == "spread"
    return grads_fine and _losses_finite(reading) and "buffers" in reading.bad_state


def _bad_gradients(context: Context, step: Step) -> list[str]:
    """Names of parameters whose gradient is non-finite, from a second run where the first ones are
    gone or clipped.
    """
    gradients = {id(p): p.grad for p in context.parameters}
    if step.grads_gone:
        given = [id(p) for group in context.optimizer.param_groups for p in group["params"]]
        gradients = dict(zip(given, rerun(step).gradients, strict=True)) if step.replayable else {}
    found = [
        (name, gradients.get(id(p)))
        for p, name in parameter_names(context.roots, context.optimizer)
    ]
    return [name for name, gradient in found if gradient is not None and not finite(gradient)]
