"""Clip the gradients of a loop that stays as it is, as if it called torch's clipping itself.

The norm before clipping is observed as that of any loop that clips (sentinel/torch_patches).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stepguard._errors import ConfigError
from stepguard.engine.drivers.optimizer_kinds import evaluates_again, needs_closure


def clip_before_update(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, max_norm: float
) -> RemovableHandle:
    """Clip at the beginning of every `optimizer.step()`, before any hook that comes later."""
    _refuse_what_cannot(optimizer, scaler, max_norm)

    def clip(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(max_norm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)

    # where `optimizer.step` is compiled, hooks must stay out of the graph
    outside: Any = torch.compiler.disable
    return optimizer.register_step_pre_hook(outside(clip))


def _refuse_what_cannot(optimizer: Optimizer, scaler: GradScaler | None, max_norm: float) -> None:
    name = type(optimizer).__name__
    if needs_closure(optimizer) or evaluates_again(optimizer):
        raise ConfigError(
            f"GuardConfig.clip_norm={max_norm!r} cannot clip for {name}, which computes gradients "
            "inside its step; call torch.nn.utils.clip_grad_norm_ in its closure."
        )
    scales = scaler is not None and scaler.is_enabled()
    if scales and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigError(
            f"GuardConfig.clip_norm={max_norm!r} cannot clip for a fused {name} with a GradScaler, "
            "whose gradients are still scaled then; call scaler.unscale_(optimizer) and "
            "torch.nn.utils.clip_grad_norm_ in the loop, or make it without fused=True."
        )
