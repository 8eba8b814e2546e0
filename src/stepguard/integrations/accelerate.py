"""stepguard inside accelerate: call `guard(accelerator)` after `accelerator.prepare`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = stepguard.integrations.accelerate.guard(accelerator)

Writing `loss = guard.loss(loss_fn, batch)` in place of `loss = loss_fn(batch)` makes bad steps
replayable as a whole.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard._errors import ConfigError, SaveRefused
from stepguard.guard import Guard
from stepguard.integrations._parts import Framework
from stepguard.records import GuardConfig, Incident
from stepguard.state.batch import LossFn, total_loss
from stepguard.watching import watch_for

ACCELERATE = Framework("accelerate", first="1.10", before="2.0", tested="1.15.0")
ACCELERATE.require()

from accelerate import Accelerator  # noqa: E402 (first the version, then what that version must have)
from accelerate.utils import DistributedType  # noqa: E402

from stepguard.integrations._parts import hold_schedule  # noqa: E402
from stepguard.tensors.names import optimizer_parameter_ids, wrap  # noqa: E402

__all__ = ["AcceleratorGuard", "SaveRefused", "guard"]

NEEDED = ("_optimizers", "_models", "_schedulers", "backward", "save_state", "save_model")
FOREIGN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Backends that update the weights inside an engine of their own, where a guard cannot veto."""


def guard(accelerator: Accelerator, config: GuardConfig | None = None) -> AcceleratorGuard:
    """Guard every optimizer that this accelerator has prepared. `close()` undoes everything."""
    ACCELERATE.need(accelerator, *NEEDED)
    if accelerator.distributed_type in FOREIGN:
        raise ConfigError(
            f"{accelerator.distributed_type} updates the weights itself, where a guard cannot "
            "veto; train without it."
        )
    if not accelerator._optimizers:
        raise ConfigError(
            "this accelerator has prepared no optimizer; call guard() after "
            "accelerator.prepare(...)."
        )
    return AcceleratorGuard(accelerator, config or GuardConfig())


class AcceleratorGuard:
    """Guards the optimizers of one accelerator. A context manager; built by `guard`."""

    def __init__(self, accelerator: Any, config: GuardConfig) -> None:
        self._accelerator = accelerator
        self._undo = ExitStack()
        self.guards: tuple[Guard, ...] = ()
        """One an optimizer, in the order in which they were prepared."""
        try:
            for optimizer in accelerator._optimizers:
                self.guards += (self._watch(optimizer, _checked(config)),)
        except BaseException:
            self.close()
            raise
        wrap(self._undo, accelerator, "save_state", self._refusing)
        wrap(self._undo, accelerator, "save_model", self._refusing)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, by optimizer, oldest first."""
        found: tuple[Incident, ...] = ()
        for one in self.guards:
            found += one.incidents
        return found

    def loss(self, loss_fn: LossFn, batch: Any, *, optimizer: Optimizer | None = None) -> Tensor:
        """`loss_fn(batch)`, remembered so that a bad step can be replayed from the batch on.

        Call it where the loss is computed, and give the result to `accelerator.backward`.
        `optimizer`: the one that this loss is for, where there are several.
        """
        steps = self._accelerator.gradient_accumulation_steps
        wanted = getattr(optimizer, "optimizer", optimizer)
        for one in self.guards:
            if wanted is None or one.optimizer is wanted:
                one.port.micro(lambda again: total_loss(loss_fn(again)) / steps, batch)
        return total_loss(loss_fn(batch))

    def close(self) -> None:
        """Read what is pending and undo every wrap. Safe to call twice."""
        with ExitStack() as closing:
            closing.callback(self._undo.close)
            for one in self.guards:
                closing.callback(one.close)

    def _watch(self, wrapper: Any, config: GuardConfig) -> Guard:
        model, others = _trained(self._accelerator, wrapper)
        inner = watch_for(
            "accelerate",
            model,
            wrapper,
            modules=others or None,
            scheduler=_scheduler(self._accelerator, wrapper),
            scaler=self._accelerator.scaler,
            config=config,
        )
        hold_schedule(wrapper, inner, self._undo)
        return inner

    def _refusing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Raise before anything is written or, by accelerate's own rotation, deleted."""
        # Every rank calls save_state, but only some of them save_model.
        all_ranks = original.__name__ == "save_state"

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            bad: tuple[str, ...] = ()
            for one in self.guards:
                one.port.settle()
                bad += one.port.trouble(together=all_ranks)
            if bad:
                refusal = SaveRefused(f"({original.__name__})", tuple(dict.fromkeys(bad)))
                self.guards[0].port.say("save-refused", str(refusal))
                raise refusal
            return original(*args, **kwargs)

        return save

    def __enter__(self) -> AcceleratorGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _checked(config: GuardConfig) -> GuardConfig:
    if config.clip_norm is not None or config.loss_scale is not None:
        raise ConfigError(
            "GuardConfig.clip_norm and loss_scale are for guard.step; call "
            "accelerator.clip_grad_norm_ in your loop."
        )
    return config


def _trained(accelerator: Any, wrapper: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The model whose parameters this optimizer has, and further ones by name."""
    ours = optimizer_parameter_ids(wrapper)
    models = []
    for model in accelerator._models:
        if not ours.isdisjoint(map(id, model.parameters())):
            models.append(model)
    if not models:
        raise ConfigError(
            f"no prepared model has the parameters of {type(wrapper.optimizer).__name__}; prepare "
            f"the model as well."
        )
    others = {f"model{i}": model for i, model in enumerate(models[1:], start=1)}
    return _parallel(models[0]), others


def _parallel(model: nn.Module) -> nn.Module:
    """The DDP around a model: accelerate hands it to the user and keeps only the inner one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return model
    wrappers = [o for o in gc.get_objects() if type(o) is DistributedDataParallel]
    return next((wrapper for wrapper in wrappers if wrapper.module is model), model)


def _scheduler(accelerator: Any, wrapper: Any) -> Any:
    """The torch schedule inside accelerate's wrapper, or the one that was not prepared."""
    for scheduler in accelerator._schedulers:
        if wrapper in getattr(scheduler, "optimizers", ()):
            inner = getattr(scheduler, "scheduler", scheduler)
            if getattr(inner, "optimizer", None) in (wrapper, wrapper.optimizer):
                return inner
    return None
