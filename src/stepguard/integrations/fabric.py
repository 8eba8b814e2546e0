"""stepguard inside Fabric: call `guard(fabric, model, optimizer)` after `fabric.setup`.

    model, optimizer = fabric.setup(model, optimizer)
    guard = stepguard.integrations.fabric.guard(fabric, model, optimizer, scheduler=scheduler)

Writing `loss = guard.loss(loss_fn, batch)` in place of `loss = loss_fn(batch)` makes bad steps
replayable as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import ConfigError, SaveRefused
from stepguard.guard import Guard
from stepguard.integrations._parts import Framework, HostLogger
from stepguard.records import GuardConfig, Incident
from stepguard.state.batch import LossFn, total_loss
from stepguard.tensors.names import swapped, wrap
from stepguard.watching import watch_for

__all__ = ["FabricGuard", "SaveRefused", "guard"]

LIGHTNING = Framework(
    "lightning", first="2.6", before="2.7", tested="2.6.6", without=("2.6.2", "2.6.3")
)
BEFORE_ERROR = 5
"""Arguments of `clip_gradients` that come before `error_if_nonfinite`."""
PARTS = ("save", "clip_gradients", "backward", "strategy", "loggers")


class FabricGuard:
    """Guards one model and optimizer of a Fabric. A context manager; `close` undoes everything."""

    def __init__(
        self,
        fabric: Any,
        model: Any,
        optimizer: Any,
        scheduler: LRScheduler | None,
        config: GuardConfig,
    ) -> None:
        self._model = model
        self._undo = ExitStack()
        if fabric.loggers:
            config = replace(config, sinks=(*config.sinks, HostLogger(fabric.loggers)))
        precision = fabric.strategy.precision
        self._guard = watch_for(
            "fabric",
            model._forward_module,
            optimizer.optimizer,
            scheduler=scheduler,
            scaler=getattr(precision, "scaler", None),
            config=config,
        )
        self._undo.callback(self._guard.close)
        wrap(self._undo, fabric, "save", self._unless_bad)
        wrap(self._undo, fabric, "clip_gradients", _never_raising)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, oldest first."""
        return self._guard.incidents

    @property
    def guard(self) -> Guard:
        """The guard behind it, for `on_commit`, `steps` and the rest."""
        return self._guard

    @property
    def dropped(self) -> bool:
        """Was the last update vetoed?"""
        return self._guard.port.dropped

    def loss(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """`loss_fn(batch)`, remembered so that a bad step can be replayed from the batch on.

        Call it where the loss is computed, and give the result to `fabric.backward` as it is: where
        losses of several micro-batches are averaged, `loss_fn` divides.
        """
        self._guard.port.micro(self._again(loss_fn), batch)
        return total_loss(loss_fn(batch))

    def close(self) -> None:
        """Undo every hook and wrapper. Safe to call twice."""
        self._undo.close()

    def __enter__(self) -> FabricGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _again(self, loss_fn: LossFn) -> LossFn:
        """The same loss in a replay, whose backward is not Fabric's."""

        def again(batch: Any) -> Any:
            with _free_backward(self._model):
                return loss_fn(batch)

        return again

    def _unless_bad(self, original: Callable[..., None]) -> Callable[..., None]:
        """Raise before anything is written; every rank calls `fabric.save`, so all are asked."""

        def save(path: Any, *args: Any, **kwargs: Any) -> None:
            self._guard.port.settle()
            bad = self._guard.port.trouble(together=True)
            if bad:
                refusal = SaveRefused(str(path), bad)
                self._guard.port.say("save-refused", str(refusal))
                raise refusal
            original(path, *args, **kwargs)

        return save


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
    if config is not None and (config.clip_norm is not None or config.loss_scale is not None):
        raise ConfigError(
            "GuardConfig.clip_norm and loss_scale are for guard.step; use fabric.clip_gradients."
        )
    inner = getattr(optimizer, "optimizer", None)
    if not hasattr(model, "_forward_module") or not isinstance(inner, Optimizer):
        raise ConfigError(
            f"model is a {type(model).__name__} and optimizer a {type(optimizer).__name__}; give "
            "what `model, optimizer = fabric.setup(model, optimizer)` returned."
        )
    return FabricGuard(fabric, model, optimizer, scheduler, config or GuardConfig())


def _never_raising(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fabric's clipping raises where the norm is not finite; the guard vetoes that step instead."""

    def clip(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:BEFORE_ERROR], **{**kwargs, "error_if_nonfinite": False})

    return clip


@contextmanager
def _free_backward(model: nn.Module) -> Iterator[None]:
    """Let a replay call backward: outputs of a Fabric module insist on `fabric.backward`."""
    with swapped(model, "_register_backward_hook", lambda tensor: tensor):
        yield
