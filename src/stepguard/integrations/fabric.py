"""stepguard inside Fabric: call `guard(fabric, model, optimizer)` after `fabric.setup`.

    model, optimizer = fabric.setup(model, optimizer)
    guard = stepguard.integrations.fabric.guard(fabric, model, optimizer, scheduler=scheduler)

Writing `loss = guard.loss(loss_fn, batch)` in place of `loss = loss_fn(batch)` makes bad steps
replayable as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import ConfigError, SaveRefused
from stepguard.guard import Guard
from stepguard.integrations._parts import (
    LIGHTNING,
    HostGuard,
    HostLogger,
    around,
    refuse_settings_of_step,
)
from stepguard.records import GuardConfig
from stepguard.state.batch import LossFn, total_loss
from stepguard.tensors.names import swapped

__all__ = ["FabricGuard", "SaveRefused", "guard"]

PARTS = ("save", "clip_gradients", "backward", "strategy", "loggers")


class FabricGuard(HostGuard):
    """Guards one model and optimizer of a Fabric. A context manager; `close` undoes everything."""

    def __init__(
        self,
        fabric: Any,
        model: Any,
        optimizer: Any,
        scheduler: LRScheduler | None,
        config: GuardConfig,
    ) -> None:
        super().__init__()
        self._model = model
        if fabric.loggers:
            config = replace(config, sinks=(*config.sinks, HostLogger(fabric.loggers)))
        self.guard: Guard = self.watch(
            "fabric",
            model._forward_module,
            optimizer.optimizer,
            scheduler=scheduler,
            scaler=getattr(fabric.strategy.precision, "scaler", None),
            config=config,
        )
        """The guard behind it, for `on_commit`, `steps` and the rest."""

        def save(original: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
            """Raise before anything is written; every rank calls it, so all are asked."""
            self.settle()
            refused = self.refusal(str(path), together=True)
            if refused is not None:
                raise refused
            original(path, *args, **kwargs)

        def clip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Fabric raises where the norm is not finite; the guard vetoes that step instead."""
            # five arguments come before this one
            return original(*args[:5], **{**kwargs, "error_if_nonfinite": False})

        around(self._undo, fabric, "save", save)
        around(self._undo, fabric, "clip_gradients", clip)

    @property
    def dropped(self) -> bool:
        """Was the last update vetoed?"""
        return self.guard.port.dropped

    def loss(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Return `loss_fn(batch)` and remember it, so that a bad step can be replayed.

        Call it where the loss is computed, and give the result to `fabric.backward` as it is: where
        losses of several micro-batches are averaged, `loss_fn` divides.
        """

        def again(batch: Any) -> Any:
            # Outputs of a Fabric module insist on `fabric.backward`, which a replay does not call.
            with swapped(self._model, "_register_backward_hook", lambda tensor: tensor):
                return loss_fn(batch)

        self.guard.port.micro(again, batch)
        return total_loss(loss_fn(batch))


def guard(
    fabric: Any,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: LRScheduler | None = None,
    config: GuardConfig | None = None,
) -> FabricGuard:
    """Guard a model and an optimizer that came from `fabric.setup(model, optimizer)`."""
    LIGHTNING.require()
    LIGHTNING.need(fabric, *PARTS)
    config = config or GuardConfig()
    refuse_settings_of_step(config, "use fabric.clip_gradients")
    inner = getattr(optimizer, "optimizer", None)
    if not hasattr(model, "_forward_module") or not isinstance(inner, Optimizer):
        raise ConfigError(
            f"model is a {type(model).__name__} and optimizer a {type(optimizer).__name__}; give "
            "what `model, optimizer = fabric.setup(model, optimizer)` returned."
        )
    return FabricGuard(fabric, model, optimizer, scheduler, config)
