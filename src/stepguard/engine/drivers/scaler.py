"""The user's GradScaler: end its step without moving it, and go back to how it was."""

from __future__ import annotations

import torch

from stepguard.engine.context import Context
from stepguard.sentinel.gradients import scale_gradients
from stepguard.tensors.torch_private import scaler_tensors

ScalerState = tuple[torch.Tensor, torch.Tensor]
"""Scale and growth counter."""


def present_scale(context: Context) -> torch.Tensor | None:
    """Return a copy of the scale on its device; None before the scaler's first use."""
    if context.scaler is None:
        return None
    # `get_scale` would wait for the device
    scale = context.scaler._get_scale_async()
    if scale is None:
        return None
    return scale.detach().clone()


def hold_scaler(context: Context) -> None:
    """End the scaler's step without moving scale or growth: this batch never came."""
    if context.scaler is None or not context.scaling():
        return
    scale = present_scale(context)
    if scale is not None:
        # without an argument `update` would count the step as one without overflow
        context.scaler.update(new_scale=scale)


def update_scaler(context: Context) -> None:
    """End the scaler's step as the bare loop would."""
    if context.scaler is not None and context.scaling():
        context.scaler.update()


def scaler_copy(context: Context) -> ScalerState | None:
    """Copy scale and growth counter on the device; None where the scaler does not scale yet."""
    scaler = context.scaler
    if scaler is None or not context.scaling():
        return None
    live = scaler_tensors(scaler)
    if live is None:
        return None
    scale, growth = live
    return scale.clone(), growth.clone()


def restore_scaler(context: Context, saved: ScalerState | None) -> None:
    """Put back what `scaler_copy` returned."""
    scaler = context.scaler
    if saved is None or scaler is None:
        return
    live = scaler_tensors(scaler)
    if live is not None:
        for tensor, value in zip(live, saved, strict=True):
            tensor.copy_(value)


def scaled(context: Context, loss: torch.Tensor) -> torch.Tensor:
    """The loss to call backward on, by the user's scaler or by the static scale."""
    if context.scaler is not None and context.scaling():
        return context.scaler.scale(loss)
    if context.loss_scale != 1.0:
        return loss * context.loss_scale
    return loss


def unscale(context: Context) -> None:
    """Divide the scale out of the gradients."""
    if context.scaler is not None and context.scaling():
        context.scaler.unscale_(context.optimizer)
    elif context.loss_scale != 1.0:
        scale_gradients(context.parameters, 1.0 / context.loss_scale)
