"""stepguard inside torchtitan: call `guard(trainer)` before `trainer.train()`, on every rank.

    trainer = config.build()
    with stepguard.integrations.torchtitan.guard(trainer):
        trainer.train()

Its trainer is FSDP2 in a plain loop, so `stepguard.watch` vetoes there. torchtitan checks the loss
after the update and ends the run; of a step that was vetoed the guard answers that check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepguard._errors import ConfigError, SaveRefused
from stepguard.integrations._parts import (
    Framework,
    HostGuard,
    around,
    refuse_settings_of_step,
)
from stepguard.records import GuardConfig

TORCHTITAN = Framework("torchtitan", first="0.3", before="0.4", tested="0.3.0")
TORCHTITAN.require()

from torchtitan.trainer import Trainer  # noqa: E402 (first the version)

__all__ = ["SaveRefused", "TitanGuard", "guard"]


def guard(trainer: Trainer, config: GuardConfig | None = None) -> TitanGuard:
    """Guard the steps and the checkpoints of this trainer. `close()` undoes everything."""
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"guard() got a {type(trainer).__name__}; give the Trainer that config.build() made."
        )
    TORCHTITAN.need(trainer, "model_parts", "optimizers", "lr_schedulers", "checkpointer")
    TORCHTITAN.need(trainer.checkpointer, "save", "_should_save")
    config = config or GuardConfig()
    refuse_settings_of_step(config, "set training.max_norm of torchtitan")
    if len(trainer.model_parts) != 1 or len(trainer.optimizers.optimizers) != 1:
        raise ConfigError(
            f"the trainer has {len(trainer.model_parts)} model parts and "
            f"{len(trainer.optimizers.optimizers)} optimizers; this guard works with one of each."
        )
    return TitanGuard(trainer, config)


class TitanGuard(HostGuard):
    """Guards one trainer. A context manager; built by `guard`."""

    def __init__(self, trainer: Any, config: GuardConfig) -> None:
        super().__init__()
        self._trainer = trainer
        (model,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
        schedulers = trainer.lr_schedulers.schedulers
        # Its loss runs the head of the model in chunks, with FSDP2 set otherwise meanwhile. A rank
        # that replayed a step would gather the head in another order than the others.
        config = replace(config, probes=replace(config.probes, locate_budget=0))
        self.watch("torchtitan", model, optimizer, scheduler=schedulers, config=config)
        around(self._undo, trainer, "train_step", self._train_step)
        around(self._undo, trainer.checkpointer, "save", self._save)

    def _train_step(self, original: Callable[..., Any], data: Any) -> Any:
        inner = self.guards[0]
        if not inner.steps:
            # a checkpoint may have been loaded when the run began
            inner.port.start_at(self._trainer.step - 1)
        before = inner.steps
        try:
            return original(data)
        except RuntimeError:
            # "Loss is not finite", of a step whose update has not happened
            self.settle()
            if inner.steps == before or not inner.port.dropped:
                raise

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._trainer.checkpointer._should_save(*args, **kwargs):
            return original(*args, **kwargs)
        self.settle()
        refused = self.refusal("a checkpoint of torchtitan", together=True)
        if refused is not None:
            raise refused
        return original(*args, **kwargs)
