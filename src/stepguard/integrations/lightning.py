"""stepguard inside Lightning: `Trainer(callbacks=[GuardCallback()])`.

Automatic optimization with accumulation, clipping and mixed precision, on one device or under DDP,
is replayed exactly. Manual optimization is watched, one guard an optimizer, and only the model's
part is replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import SaveRefused
from stepguard.integrations._parts import (
    LIGHTNING,
    HostGuard,
    HostLogger,
    around,
    refuse_settings_of_step,
)
from stepguard.records import GuardConfig
from stepguard.tensors.names import swapped

LIGHTNING.require()

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402 (first the version, then its parts)
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.io import CheckpointIO  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402

__all__ = ["GuardCallback", "SaveRefused"]

OF_STRATEGY = ("training_step", "model", "checkpoint_io", "precision_plugin")
AUTOMATIC = ("_save_topk_checkpoint", "_save_last_checkpoint")
"""Where ModelCheckpoint saves, books the file and drops older ones."""
# Of a torchmetrics.Metric, which is known by its attributes: importing it takes a second.
METRIC_COUNTERS = ("_update_count", "_computed", "_forward_cache")
MANUAL = (
    "stepguard: with manual optimization every optimizer has a guard that vetoes its bad updates "
    "and locates them within the model, but the training_step as a whole cannot be replayed."
)


class GuardCallback(HostGuard, Callback):  # type: ignore[misc]
    """Guards every optimizer of a Trainer during `fit`, and checkpoints until `close`."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self.config = config or GuardConfig()
        refuse_settings_of_step(self.config, "use Trainer(gradient_clip_val=..., precision=...)")
        self._checked = False
        """Inside a save whose state was checked: saving functions are nested."""

    # --- Lightning's hooks, in the order in which they are called ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the guarded IO; `trainer.save_checkpoint` raises, ModelCheckpoint skips."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        LIGHTNING.need(strategy, *OF_STRATEGY)
        self._undo.close()
        before = strategy.checkpoint_io
        # Only one rank writes, so the others cannot be asked there.
        ours = GuardedCheckpointIO(before, partial(self.refusal, together=False))
        strategy.checkpoint_io = ours

        def put_back() -> None:
            if strategy.checkpoint_io is ours:
                strategy.checkpoint_io = before

        self._undo.callback(put_back)

        def by_name(original: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
            """Raise where a file was asked for by name, unless another exception is on its way."""
            refused = self.refusal(str(path))
            if refused is not None and not trainer.interrupted:
                raise refused
            if refused is None:
                with swapped(self, "_checked", other=True):
                    original(path, *args, **kwargs)

        def automatically(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            """Skip the save as a whole: ModelCheckpoint would count a missing file."""
            if self.refusal("a checkpoint") is None:
                with swapped(self, "_checked", other=True):
                    original(*args, **kwargs)

        around(self._undo, trainer, "save_checkpoint", by_name)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                for name in AUTOMATIC:
                    around(self._undo, callback, name, automatically)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin_run()
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            untested = (
                f"stepguard: {type(trainer.strategy).__name__} has not been tested with "
                "GuardCallback; SingleDeviceStrategy and DDPStrategy have."
            )
            warnings.warn(untested, RuntimeWarning, stacklevel=2)
        if not pl_module.automatic_optimization:
            warnings.warn(MANUAL, RuntimeWarning, stacklevel=2)
        for number, optimizer in enumerate(trainer.optimizers):
            # the optimizer's own schedule; of several, one that counts steps rather than epochs
            configs = [
                one for one in trainer.lr_scheduler_configs if one.scheduler.optimizer is optimizer
            ]
            configs.sort(key=lambda one: bool(one.interval != "step"))
            scheduler = configs[0].scheduler if configs else None
            self.watch(
                "lightning",
                trainer.strategy.model,
                optimizer,
                done=trainer.global_step,
                scheduler=scheduler if isinstance(scheduler, LRScheduler) else None,
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                config=_settings(self.config, trainer, number),
            )
        if trainer.loggers:
            connector = trainer._logger_connector
            LIGHTNING.need(connector, "log_metrics")

            def log(original: Callable[..., None], metrics: Any, *args: Any, **kwargs: Any) -> None:
                original(metrics, *args, **kwargs)
                self.logged(metrics, trainer.global_step)

            around(self._run, connector, "log_metrics", log)
        if pl_module.automatic_optimization:
            loop = trainer.fit_loop.epoch_loop
            LIGHTNING.need(loop, "update_lr_schedulers")
            announce = partial(self._announce, TrainingStep(trainer, pl_module))

            def hold(original: Callable[..., None], interval: str, **kwargs: bool) -> None:
                """Keep a schedule that counts steps from counting one that was vetoed."""
                if interval != "step" or not self.guards[0].port.dropped:
                    original(interval, **kwargs)

            around(self._run, trainer.strategy, "training_step", announce)
            around(self._run, loop, "update_lr_schedulers", hold)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end_run()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.end_run()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.end_run()

    # --- what is wrapped: each gets the original first ---

    def _announce(
        self, step: TrainingStep, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Hand every micro-batch to the guard before it runs."""
        (guard,) = self.guards  # automatic optimization has one optimizer
        # A training_step may take the iterator of a loader, which cannot be run again.
        if args and not isinstance(args[0], Iterator):
            step.about_to_run(args[0], args[1:], guard.steps)
            guard.port.micro(step, args[0])
        return original(*args, **kwargs)

    def refusal(self, what: str, *, together: bool = True) -> SaveRefused | None:
        if self._checked:
            return None
        if together:
            # The vetoed schedule of a fused step must be put back before it is saved.
            self.settle()
        return super().refusal(what, together=together)


def _settings(config: GuardConfig, trainer: Trainer, number: int) -> GuardConfig:
    """The user's, with the Trainer's loggers for the first optimizer."""
    if number:
        return replace(config, human_log=None, sinks=())
    if trainer.loggers and trainer.log_every_n_steps:
        ours = HostLogger(trainer.loggers, every=trainer.log_every_n_steps)
        return replace(config, sinks=(*config.sinks, ours))
    return config


class TrainingStep:
    """Lightning's `training_step`, from the batch to the loss that backward starts from."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._rest: dict[int, tuple[Any, ...]] = {}
        self._last: tuple[Any, ...] = ()
        self._step = -1

    def about_to_run(self, batch: Any, rest: tuple[Any, ...], step: int) -> None:
        """Remember what `training_step` gets besides the batch: mostly its index."""
        if step != self._step:
            self._rest = {}
            self._step = step
        self._rest[id(batch)] = rest
        self._last = rest

    def __call__(self, batch: Any) -> Tensor:
        """The loss Lightning calls backward on; part of a batch gets the index of the last one.

        Nothing is logged, and metrics forget what they see.
        """
        rest = self._rest.get(id(batch), self._last)
        with ExitStack() as undo:
            for part in self._module.modules():
                if hasattr(part, "_defaults") and hasattr(part, "_update_count"):
                    for name in (*part._defaults, *METRIC_COUNTERS):
                        value = getattr(part, name)
                        kept = value.clone() if isinstance(value, Tensor) else copy(value)
                        undo.callback(setattr, part, name, kept)
            undo.enter_context(swapped(self._module, "log", lambda *args, **kwargs: None))
            undo.enter_context(self._trainer.precision_plugin.train_step_context())
            output = self._module.training_step(batch, *rest)
        loss = output["loss"] if isinstance(output, Mapping) else output
        assert isinstance(loss, Tensor), "training_step returned no loss"
        return loss.div(self._trainer.accumulate_grad_batches)


class GuardedCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """The Trainer's IO that neither writes a non-finite state nor deletes the last good one."""

    def __init__(self, inner: CheckpointIO, refused: Callable[[str], object]) -> None:
        self.inner = inner
        self._refused = refused
        self._good: list[str] = []
        """Checkpoints written here that are still there, oldest first."""
        self._waiting: list[str] = []
        """Rotation asked for their removal, but nothing good would have been left."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if self._refused(str(path)):
            return
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        saved = str(Path(path).absolute())
        if saved in self._good:
            self._good.remove(saved)
        self._good.append(saved)
        waiting = self._waiting
        self._waiting = []
        for name in waiting:
            if name != saved:
                self.remove_checkpoint(name)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = self.inner.load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        name = str(Path(path).absolute())
        if self._good == [name]:
            self._waiting.append(name)
            return
        if name in self._good:
            self._good.remove(name)
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()
