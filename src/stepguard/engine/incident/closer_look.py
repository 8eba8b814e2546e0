"""Look closer after an alarming reading: which tensors are bad, or is it the loss scale?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from stepguard.engine.context import Context
from stepguard.engine.reader import only_loss_infinite
from stepguard.locate.origins import overflowed_in_replay
from stepguard.locate.replay import kept_loss_function_state
from stepguard.ranks.agreement import ASKED, RankFault
from stepguard.records import Evidence, Operand, Origin, Reading, Verdict
from stepguard.records.incident import OK, VerdictKind, with_evidence
from stepguard.sentinel.gradients import (
    bad_buffers,
    bad_parameters,
    bad_slots,
    gradient_norm,
    norm_statistics,
    state_tensors,
)
from stepguard.state.batch import Step, bad_batch_tensors
from stepguard.state.isolation import gradients_came_back_finite, kept_buffers, model_finite, rerun
from stepguard.state.run_state import extra_tensors
from stepguard.tensors.names import optimizer_parameters, parameter_names
from stepguard.tensors.values import dense_real, is_finite

# --- Look closer after an alarming reading: which tensors are bad, or is it the loss scale?


LOWEST_SCALE = 2.0**-24
LOOK_CLOSER_AFTER = 4
"""Overflows in a row after which it is no longer presumed that a scaler is calibrating."""
FAR_BELOW = 2.0**-10
"""Share of an overflowing loss scale at which a step is finite if only the scale is wrong."""


def examine(context: Context, step: Step, reading: Reading) -> Reading:
    """Name what is bad. Reads everything stored, so it is slow and only for bad steps."""
    if reading.state_born:
        # found after the update, which has been undone since
        return reading
    if context.memory.missed:
        # another rank's refusal arrived as NaN gradients; this rank's are fine
        fine = replace(reading, grads_finite=True, grad_norm=None, bad_state=())
        return replace(fine, missed=context.memory.missed)
    if _only_rate(context, reading):
        reading = replace(reading, grads_finite=True, grad_norm=None)
    if _only_gradients(context, reading) and overflows_by_scale(context, step, reading):
        return replace(reading, overflow=True, bad_state=())
    buffers_after = _unaccepted(context, bad_buffers(context.roots))
    with kept_buffers(context.roots.values()):
        step.buffers.restore()
        bad_state = stored_trouble(context)
    made_now = bool(buffers_after) and not bad_state and _only_buffers(context, reading)
    if made_now:
        bad_state = buffers_after
    if not buffers_after:
        ignore_sentinels(context)
    found = replace(
        reading,
        bad_state=tuple(bad_state),
        state_born=made_now,
        bad_inputs=tuple(bad_batch_tensors(step.micro_batches)),
        bad_grads=tuple(_bad_gradients(context, step)),
    )
    # Is an infinite loss all that is wrong, made by adding up finite values?
    if not only_loss_infinite(found):
        only_loss_overflows = False
    elif not step.replayable:
        only_loss_overflows = step.summed_in_half
    else:
        context.scales.loss_overflows += 1
        # the user's loss function is not run again for each of a long series
        power_of_two = context.scales.loss_overflows & (context.scales.loss_overflows - 1) == 0
        if power_of_two and not overflowed_in_replay(step, found.bad_micro_batches):
            context.scales.loss_overflows = 0
            only_loss_overflows = False
        else:
            only_loss_overflows = True
    return replace(found, loss_overflow=only_loss_overflows)


def _only_gradients(context: Context, reading: Reading) -> bool:
    """Are the gradients all that is bad? Then it may be the loss scale."""
    if reading.grads_finite or not _losses_finite(reading):
        return False
    # else gradients may carry what this rank holds to the others
    return context.agreement.mode != "spread" or not reading.bad_state


def stored_trouble(context: Context) -> list[str]:
    """Parameters, buffers and optimizer slots that are non-finite now and should not be."""
    found = [
        *bad_parameters(context.roots, context.optimizer, _elsewhere(context)),
        *bad_buffers(context.roots),
        *bad_slots(context.roots, context.optimizer),
    ]
    return list(dict.fromkeys(map(_label, _unaccepted(context, found))))


def _label(name: str) -> str:
    """Return the name used in records: an optimizer slot without its parameter."""
    return f"opt:{name.rpartition('/')[2]}" if name.startswith("opt:") else name


def _unaccepted(context: Context, names: list[str]) -> list[str]:
    """Names not accepted as non-finite. The first call reads the device."""
    if not names:
        return []
    accepted = context.on_purpose()
    return [name for name in names if name not in accepted]


def _elsewhere(context: Context) -> set[int]:
    """Ids of parameters that another optimizer trains: to this guard they are data."""
    if not context.history.committed:
        # before the first update everything is checked
        return set()
    return context.ownership.elsewhere()


def mark_foreign_parameter(context: Context, origin: Origin | None) -> Origin | None:
    """Mark an origin in a parameter that another optimizer trains: going back cures nothing."""
    if origin is None or origin.phase != "state" or not (origin.tensor or "").startswith("param:"):
        return origin
    elsewhere = _elsewhere(context)
    for parameter, name in parameter_names(context.roots, context.optimizer):
        if origin.tensor == f"param:{name}" and id(parameter) in elsewhere:
            return with_evidence(origin, Evidence(as_data=True))
    return origin


def born_in_update(context: Context) -> list[str]:
    """Name what an update has just made non-finite."""
    stored = (*context.parameters, *state_tensors(context.optimizer))
    checked: list[Tensor] = []
    for tensor in stored:
        if id(tensor) not in context.meant.ignored:
            values = dense_real(tensor).detach()
            if values.is_floating_point():
                checked.append(values)
    # a finite norm of it all proves in one pass that every element is finite
    norm = gradient_norm(checked)
    if norm is None or bool(torch.isfinite(norm.total)):
        return []
    return stored_trouble(context)


def bad_tensors(model: nn.Module) -> tuple[str, ...]:
    """Name the non-finite parameters and norm statistics of a model without a guard."""
    statistics = {id(buffer) for buffer in norm_statistics({"": model})}
    found = [f"param:{name}" for name, p in model.named_parameters() if not is_finite(p)]
    for name, buffer in model.named_buffers():
        if id(buffer) in statistics and not is_finite(buffer):
            found.append(f"buffer:{name}")
    return tuple(found)


def agreed_trouble(context: Context, *, together: bool) -> tuple[str, ...]:
    """`stored_trouble` of this rank, or of all ranks if all of them ask now."""
    if not together:
        return tuple(stored_trouble(context))
    try:
        told = context.agreement.together(
            lambda: {"bad": stored_trouble(context)}, "an inspection of the weights", seconds=ASKED
        )
    except RankFault:
        # a rank whose guard has disarmed itself does not take part
        return tuple(stored_trouble(context))
    names: dict[str, None] = {}
    for facts in told:
        names.update(dict.fromkeys(facts["bad"]))
    return tuple(names)


def accept(context: Context, names: Iterable[str]) -> None:
    """Ignore state that was bad from the start: the policy lets it pass."""
    bad = set(names)
    slots = bad_slots(context.roots, context.optimizer)
    context.meant.names.update(name for name in bad if not name.startswith("opt:"))
    context.meant.names.update(slot for slot in slots if _label(slot) in bad)
    copies = extra_tensors(context.extra).items()
    context.meant.names.update(name for name, tensor in copies if not is_finite(tensor))
    stored = [
        *context.parameters,
        *norm_statistics(context.roots),
        *state_tensors(context.optimizer),
    ]
    _ignore_nonfinite(context, stored)


def ignore_sentinels(context: Context) -> None:
    """Leave buffers that are non-finite on purpose and often written out of the cheap reading."""
    _ignore_nonfinite(context, context.buffers.written())


def _ignore_nonfinite(context: Context, tensors: Iterable[Tensor]) -> None:
    context.meant.ignored.update(id(tensor) for tensor in tensors if not is_finite(tensor))


def overflows_by_scale(context: Context, step: Step, reading: Reading) -> bool:
    """Is the same step finite with a lower loss scale? Then the scale is the only fault."""
    scale = reading.scale or step.scale
    if context.scaling() and _usual_for_a_scaler(context, scale, reading.grad_norm):
        return True
    with kept_loss_function_state(step):
        if not context.scaling():
            return step.scale != 1.0 and step.replayable and rerun(step, scale=1.0).grads_finite
        if step.model_only:
            # the loss's own backward cannot be run again: infinities out of it are the scale's
            return model_finite(step, scale=scale) or not gradients_came_back_finite(step)
        if not step.replayable:
            # cannot be run again: a scaler that still falls is presumed to be calibrating
            return True
        return rerun(step, scale=min(1.0, step.scale * FAR_BELOW)).grads_finite


def _usual_for_a_scaler(context: Context, scale: float, norm: float | None) -> bool:
    """Is it a scaler that tries a higher scale? It overflows now and then in a healthy run.

    An overflow leaves infinities, so the norm is infinite. A NaN may have been one before, so the
    step is run again, and so it is with a scale that keeps falling.
    """
    if context.scales.overflows_in_a_row >= LOOK_CLOSER_AFTER:
        return False
    worked = context.scales.worked
    higher_than_ever = worked is not None and scale > worked
    return higher_than_ever or (norm is not None and math.isinf(norm))


def working_scale(step: Step) -> float:
    """Half the largest power-of-two fraction of the static scale at which this step is finite."""
    # halved once more below: the next steps may have larger gradients
    scale = step.scale / 2
    while scale > LOWEST_SCALE and not rerun(step, scale=scale).grads_finite:
        scale /= 2
    return scale / 2


def _losses_finite(reading: Reading) -> bool:
    return reading.loss is None or (math.isfinite(reading.loss) and not reading.bad_micro_batches)


def _only_buffers(context: Context, reading: Reading) -> bool:
    """Is a buffer all that is wrong? Then this step's forward made it non-finite."""
    # where gradients carry a rank's own trouble to the others, theirs are non-finite because of it
    grads_fine = reading.grads_finite or context.agreement.mode == "spread"
    return grads_fine and _losses_finite(reading) and "buffers" in reading.bad_state


def _only_rate(context: Context, reading: Reading) -> bool:
    """Is this rank's learning rate what made the gradients of all ranks non-finite?"""
    if context.agreement.mode != "spread" or reading.bad_state or not _losses_finite(reading):
        return False
    return not all(map(math.isfinite, reading.lr))


def _bad_gradients(context: Context, step: Step) -> list[str]:
    """Names of parameters whose gradient is non-finite; from a second run where they are gone."""
    gradients: dict[int, Tensor | None] = {id(p): p.grad for p in context.parameters}
    if step.grads_gone:
        gradients = {}
        if step.replayable:
            given = optimizer_parameters(context.optimizer)
            gradients = dict(zip(map(id, given), rerun(step).gradients, strict=True))
    found: list[str] = []
    for parameter, name in parameter_names(context.roots, context.optimizer):
        gradient = gradients.get(id(parameter))
        if gradient is not None and not is_finite(gradient):
            found.append(name)
    return found


# --- Tell exploded weights from a bad operation: float32 overflows where exploded weights
# surface.


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


# --- Judge by the cheap reading alone, where the closer look or the verdict failed by our own
# fault.


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
        return _bad("nonfinite_parameter", f"{reading.bad_state[0]} became non-finite in this step")
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
