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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard._errors import ConfigError, SaveRefused
from stepguard.integrations._parts import Framework, HostGuard, around, refuse_settings_of_step
from stepguard.records import GuardConfig
from stepguard.state.batch import LossFn, total_loss

ACCELERATE = Framework("accelerate", first="1.10", before="2.0", tested="1.15.0")
ACCELERATE.require()

from accelerate import Accelerator  # noqa: E402 (first the version, then what that version must have)
from accelerate.utils import DistributedType  # noqa: E402

from stepguard.tensors.names import optimizer_parameter_ids  # noqa: E402

__all__ = ["AcceleratorGuard", "SaveRefused", "guard"]

NEEDED = ("_optimizers", "_models", "_schedulers", "backward", "save_state", "save_model")


def guard(accelerator: Accelerator, config: GuardConfig | None = None) -> AcceleratorGuard:
    """Guard every optimizer that this accelerator has prepared. `close()` undoes everything."""
    ACCELERATE.need(accelerator, *NEEDED)
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise ConfigError(
            "Megatron updates the weights itself, where this guard cannot veto; call "
            "stepguard.integrations.megatron.guard(model, optimizer) with what Megatron made."
        )
    if not accelerator._optimizers:
        raise ConfigError(
            "this accelerator has prepared no optimizer; call guard() after "
            "accelerator.prepare(...)."
        )
    return AcceleratorGuard(accelerator, config or GuardConfig())


class AcceleratorGuard(HostGuard):
    """Guards the optimizers of one accelerator. A context manager; built by `guard`."""

    def __init__(self, accelerator: Any, config: GuardConfig) -> None:
        super().__init__()
        refuse_settings_of_step(config, "call accelerator.clip_grad_norm_ in your loop")
        self._accelerator = accelerator
        try:
            if accelerator.distributed_type == DistributedType.DEEPSPEED:
                from stepguard.integrations import deepspeed

                engine = accelerator.deepspeed_engine_wrapped.engine
                self.adopt(deepspeed.guard(engine, config))
            for optimizer in () if self.guards else accelerator._optimizers:
                model, others = _trained(accelerator, optimizer)
                self.watch(
                    "accelerate",
                    model,
                    optimizer,
                    modules=others or None,
                    scheduler=_scheduler(accelerator, optimizer),
                    scaler=accelerator.scaler,
                    config=config,
                )
        except BaseException:
            self.close()
            raise
        for name in ("save_state", "save_model"):
            around(self._undo, accelerator, name, functools.partial(self._save, name))

    def loss(self, loss_fn: LossFn, batch: Any, *, optimizer: Optimizer | None = None) -> Tensor:
        """Return `loss_fn(batch)` and remember it, so that a bad step can be replayed.

        Call it where the loss is computed, and give the result to `accelerator.backward`.
        `optimizer`: the one that this loss is for, where there are several.
        """
        steps = self._accelerator.gradient_accumulation_steps
        wanted = getattr(optimizer, "optimizer", optimizer)
        for one in self.guards:
            if wanted is None or one.optimizer is wanted:
                one.port.micro(lambda again: total_loss(loss_fn(again)) / steps, batch)
        return total_loss(loss_fn(batch))

    def _save(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raise before anything is written or, by accelerate's own rotation, deleted."""
        self.settle()
        # Every rank calls save_state, but only some of them save_model.
        refused = self.refusal(f"({name})", together=name == "save_state")
        if refused is not None:
            raise refused
        return original(*args, **kwargs)


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
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # The DDP around a model: accelerate hands it to the user and keeps only the inner one.
        for found in gc.get_objects():
            if type(found) is DistributedDataParallel and found.module is models[0]:
                return found, others
    return models[0], others


def _scheduler(accelerator: Any, wrapper: Any) -> Any:
    """The torch schedule inside accelerate's wrapper, or the one that was not prepared."""
    for scheduler in accelerator._schedulers:
        if wrapper in getattr(scheduler, "optimizers", ()):
            inner = getattr(scheduler, "scheduler", scheduler)
            if getattr(inner, "optimizer", None) in (wrapper, wrapper.optimizer):
                return inner
    return None
