"""stepguard inside Lightning: `Trainer(callbacks=[GuardCallback()])`.

Automatic optimization with accumulation, clipping and mixed precision, on one device or under DDP,
is replayed exactly. Manual optimization is watched, one guard an optimizer, and only the model's
part is replayed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import ConfigError, SaveRefused
from stepguard.guard import Guard
from stepguard.integrations._parts import Framework
from stepguard.records import GuardConfig, Incident
from stepguard.watching import watch_for

LIGHTNING = Framework(
    "lightning", first="2.6", before="2.7", tested="2.6.6", without=("2.6.2", "2.6.3")
)
LIGHTNING.require()

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402 (first the version, then its parts)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402

from stepguard.integrations._lightning_saves import Gate, protect_checkpoints  # noqa: E402
from stepguard.integrations._lightning_step import TrainingStep  # noqa: E402
from stepguard.integrations._parts import HostLogger  # noqa: E402
from stepguard.tensors.names import wrap  # noqa: E402

__all__ = ["GuardCallback", "SaveRefused"]

OF_STRATEGY = ("training_step", "model", "checkpoint_io", "precision_plugin")
MANUAL = (
    "stepguard: with manual optimization every optimizer has a guard that vetoes its bad updates "
    "and places them within the model, but the training_step as a whole cannot be replayed."
)


class GuardCallback(Callback):  # type: ignore[misc]
    """Guards every optimizer of a Trainer during `fit`, and checkpoints until `close`."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        if self.config.clip_norm is not None or self.config.loss_scale is not None:
            raise ConfigError(
                "GuardConfig.clip_norm and loss_scale are for guard.step; "
                "use Trainer(gradient_clip_val=..., precision=...)."
            )
        self.guards: tuple[Guard, ...] = ()
        """One an optimizer, of the present or last fit."""
        self._earlier: tuple[Incident, ...] = ()
        """Of fits before that one."""
        self._fit = ExitStack()
        self._saves = ExitStack()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, of all optimizers, by step."""
        present: list[Incident] = []
        for guard in self.guards:
            present += guard.incidents
        return (*self._earlier, *sorted(present, key=lambda incident: incident.step))

    def close(self) -> None:
        """Undo everything: hooks, wrapped methods, the checkpoint IO. Safe to call twice."""
        self._fit.close()
        self._saves.close()

    # --- Lightning's hooks, in the order in which they are called ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            LIGHTNING.need(trainer.strategy, *OF_STRATEGY)
            self._saves.close()
            protect_checkpoints(self._saves, trainer, Gate(self._look, self._say))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.close()
        self._earlier = self.incidents
        self.guards = ()
        _warn_of_limits(trainer, pl_module)
        for number, optimizer in enumerate(trainer.optimizers):
            self.guards += (self._watch(trainer, optimizer, number),)
            self._fit.callback(self.guards[-1].close)
        if pl_module.automatic_optimization:
            step = TrainingStep(trainer, pl_module)
            LIGHTNING.need(trainer.fit_loop.epoch_loop, "update_lr_schedulers")
            telling = functools.partial(self._telling, step)
            wrap(self._fit, trainer.strategy, "training_step", telling)
            wrap(self._fit, trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._holding)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._fit.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._fit.close()

    # --- the parts ---

    def _watch(self, trainer: Trainer, optimizer: Optimizer, number: int) -> Guard:
        guard = watch_for(
            "lightning",
            trainer.strategy.model,
            optimizer,
            scheduler=_scheduler(trainer, optimizer),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            config=_settings(self.config, trainer, number),
        )
        guard.port.start_at(trainer.global_step)
        return guard

    def _telling(self, step: TrainingStep, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tell the guard of every micro-batch before it runs."""
        (guard,) = self.guards  # automatic optimization has one optimizer

        def training_step(*args: Any, **kwargs: Any) -> Any:
            # A training_step may take the iterator of a loader, which cannot be run again.
            if args and not isinstance(args[0], Iterator):
                step.about_to_run(args[0], args[1:], guard.steps)
                guard.port.micro(step, args[0])
            return original(*args, **kwargs)

        return training_step

    def _holding(self, original: Callable[..., None]) -> Callable[..., None]:
        """Keep a schedule that counts steps from counting one that was vetoed."""

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step" or not self.guards[0].port.dropped:
                original(interval, update_plateau_schedulers=update_plateau_schedulers)

        return update_lr_schedulers

    def _look(self, together: bool) -> tuple[str, ...]:
        """Names of non-finite stored tensors, each once."""
        if together:
            # The vetoed schedule of a fused step must be put back before it is saved.
            for guard in self.guards:
                guard.port.settle()
        names: dict[str, None] = {}
        for guard in self.guards:
            names.update(dict.fromkeys(guard.port.trouble(together=together)))
        return tuple(names)

    def _say(self, summary: str) -> None:
        self.guards[0].port.say("save-refused", summary)


def _settings(config: GuardConfig, trainer: Trainer, number: int) -> GuardConfig:
    """The user's, with the Trainer's loggers for the first optimizer."""
    if number:
        return replace(config, human_log=None, sinks=())
    if trainer.loggers and trainer.log_every_n_steps:
        ours = HostLogger(trainer.loggers, every=trainer.log_every_n_steps)
        return replace(config, sinks=(*config.sinks, ours))
    return config


def _scheduler(trainer: Trainer, optimizer: Optimizer) -> LRScheduler | None:
    """The optimizer's own; of several, one that counts steps rather than epochs."""
    configs = trainer.lr_scheduler_configs
    ours = [config for config in configs if config.scheduler.optimizer is optimizer]
    ours.sort(key=lambda config: bool(config.interval != "step"))
    if not ours or not isinstance(ours[0].scheduler, LRScheduler):
        return None
    return ours[0].scheduler


def _warn_of_limits(trainer: Trainer, module: LightningModule) -> None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        known = f"{SingleDeviceStrategy.__name__} and {DDPStrategy.__name__}"
        untested = (
            f"stepguard: {type(trainer.strategy).__name__} has not been tested with "
            f"GuardCallback; {known} have."
        )
        warnings.warn(untested, RuntimeWarning, stacklevel=3)
    if not module.automatic_optimization:
        warnings.warn(MANUAL, RuntimeWarning, stacklevel=3)
