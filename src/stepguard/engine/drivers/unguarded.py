"""The plain step of a disarmed guard: what the user's own loop would do."""

from __future__ import annotations

from typing import Any

import torch

from stepguard.engine.context import Context
from stepguard.engine.drivers.outer_optimizer import step_without_gradients
from stepguard.engine.drivers.scaler import scaled, unscale
from stepguard.engine.reader import micro_loss, own_norm
from stepguard.engine.result import StepResult
from stepguard.sentinel.gradients import GradientNorm, clip
from stepguard.state.step import LossFn


def unguarded_step(context: Context, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
    """Forward, backward and update without a look at anything."""
    context.stepped.zero_grad(set_to_none=True)
    for batch in micro_batches:
        loss, _ = micro_loss(loss_fn(batch), batch, context)
        torch.autograd.backward(scaled(context, loss))
    unscale(context)
    return unguarded_update(context)


def unguarded_update(context: Context) -> StepResult:
    """Clip and update, unless ranks that are still armed refuse the step."""
    # Armed ranks measure before they exchange what they saw: the same order of collectives.
    norm = _norm_of_ranks(context)
    if context.agreement.stay(context.step, context.parameters) and not context.scaling():
        step_without_gradients(context)
        context.step += 1
        return StepResult().resolve(None, committed=False)  # a scaler would refuse by itself
    if context.config.clip_norm is not None and norm is not None:
        clip(context.parameters, context.config.clip_norm, norm)
    elif context.config.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(context.parameters, context.config.clip_norm)
    committed = _scaled_or_plain_update(context)
    context.step += 1
    if committed:
        context.advance_schedule()
        for hook in context.commit_hooks:
            hook()
    return StepResult().resolve(None, committed=committed)


def _norm_of_ranks(context: Context) -> GradientNorm | None:
    """Measure sharded gradients that are to be clipped, unless that was done before the fault."""
    if not context.sharded or context.config.clip_norm is None:
        return None
    if context.norm_of_ranks is not None and context.norm_of_ranks[0] == context.step:
        return context.norm_of_ranks[1]
    return own_norm(context)


def _scaled_or_plain_update(context: Context) -> bool:
    """Did the optimizer really step?"""
    if context.scaler is None or not context.scaling():
        context.stepped.step()
        return True
    before = context.scaler.get_scale()
    context.scaler.step(context.optimizer)
    context.scaler.update()
    # a scaler lowers its scale exactly when it has refused the step
    return context.scaler.get_scale() >= before
