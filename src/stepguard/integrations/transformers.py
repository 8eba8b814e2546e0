"""stepguard inside transformers: `guard(trainer)` for Trainer and subclasses such as SFTTrainer.

    guard = stepguard.integrations.transformers.guard(trainer)
    trainer.train()

Instances are wrapped, no class is changed or subclassed. The weaker callback-only form is
`GradientMonitoringCallback`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from stepguard._errors import ConfigError, SaveRefused, TrainingHalted
from stepguard.engine.incident.closer_look import bad_tensors
from stepguard.guard import Guard
from stepguard.integrations._parts import Framework
from stepguard.records import GuardConfig, Incident
from stepguard.watching import watch_for

TRANSFORMERS = Framework("transformers", first="5.2", before="6.0", tested="5.22.2")
TRANSFORMERS.require()

import transformers.trainer  # noqa: E402 (first the version, then what that version must have)
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

TRANSFORMERS.need(transformers.trainer, "rotate_checkpoints")

from stepguard.integrations._monitoring import GradientMonitoringCallback, safe_compute_loss  # noqa: E402
from stepguard.integrations._parts import half_precision, hold_schedule  # noqa: E402
from stepguard.integrations._trainer_log import INCIDENTS, TrueLoss, correct  # noqa: E402
from stepguard.integrations._trainer_saves import TrainerSaves  # noqa: E402
from stepguard.integrations._trainer_step import TrainingStep  # noqa: E402
from stepguard.tensors.names import wrap  # noqa: E402

__all__ = [
    "GradientMonitoringCallback",
    "SaveRefused",
    "TrainerGuard",
    "guard",
    "half_precision",
    "safe_compute_loss",
]

WRAPPED = ("train", "training_step", "log", "save_model", "_save_checkpoint")
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def guard(trainer: Trainer, config: GuardConfig | None = None) -> TrainerGuard:
    """Guard every `train()` of this Trainer from now on. `close()` undoes everything."""
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"guard() got a {type(trainer).__name__}; give a transformers.Trainer, or a subclass "
            f"of it."
        )
    if trainer in _guarded:
        raise ConfigError("this Trainer has a guard already; close() that one first.")
    TRANSFORMERS.need(trainer, *WRAPPED, "accelerator", "callback_handler")
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError(
            "DeepSpeed updates the weights inside its engine, where a guard cannot veto; train "
            "without it."
        )
    return TrainerGuard(trainer, _settings(trainer, config or GuardConfig()))


class TrainerGuard:
    """Guards one Trainer. A context manager; built by `guard`."""

    def __init__(self, trainer: Any, config: GuardConfig) -> None:
        self._trainer = trainer
        self._config = config
        self._guard: Guard | None = None
        """Of the present `train()`."""
        self._last: Guard | None = None
        """The newest one, also when it is closed: it knows what is stored."""
        self._past: tuple[Incident, ...] = ()
        self._run = ExitStack()
        self._undo = ExitStack()
        self._losses = TrueLoss()
        self._logged = (0, 0)
        """Global step and number of incidents at the last log line."""
        self._judged = 0
        """Incidents that checkpoints have been judged by."""
        self._step = TrainingStep(trainer, trainer.training_step)
        self._saves = TrainerSaves(trainer, self._look, self._hurt, self._say)
        wrap(self._undo, trainer, "train", self._train)
        wrap(self._undo, trainer, "training_step", self._training_step)
        wrap(self._undo, trainer, "log", self._log)
        self._saves.wrap(self._undo)
        follow = _Follow(self._begin, self._end)
        # After DefaultFlowCallback, which decides the flow, and before the loggers.
        trainer.callback_handler.callbacks.insert(1, follow)
        self._undo.callback(_remove, trainer.callback_handler.callbacks, follow)
        _guarded.add(trainer)
        self._undo.callback(_guarded.discard, trainer)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident of every `train()` so far, oldest first."""
        if self._guard is None:
            return self._past
        return self._past + self._guard.incidents

    @property
    def refused_saves(self) -> int:
        """Checkpoints and models that were not written because the state was bad."""
        return self._saves.refused

    @property
    def last_good(self) -> Path | None:
        """The newest checkpoint, written or resumed from, that no later step speaks against."""
        return self._saves.last_good()

    def close(self) -> None:
        """Read what is pending and undo every wrap. Safe to call twice."""
        try:
            self._detach()
        finally:
            self._undo.close()

    def __enter__(self) -> TrainerGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- one call of train() ---

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            resumed = args[0] if args else kwargs.get("resume_from_checkpoint")
            if resumed is True:
                resumed = get_last_checkpoint(self._trainer.args.output_dir)
            self._saves.resumed_from(Path(resumed) if resumed else None)
            try:
                return original(*args, **kwargs)
            except TrainingHalted:
                _wind_up(self._trainer)
                raise
            finally:
                self._detach()

        return train

    def _begin(self) -> None:
        """Model, optimizer and schedule are prepared and loaded; nothing has been trained yet."""
        self._detach()
        trainer = self._trainer
        self._losses = TrueLoss()
        inner = watch_for(
            "transformers",
            trainer.model_wrapped,
            trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            config=self._config,
        )
        inner.port.start_at(trainer.state.global_step)
        inner.port.reads_text_with(getattr(trainer, "processing_class", None))
        self._logged = (trainer.state.global_step, len(self._past))
        self._guard = inner
        self._last = inner
        if hasattr(trainer.optimizer, "step_was_skipped"):
            hold_schedule(trainer.optimizer, inner, self._run)

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.close()

    def _detach(self) -> None:
        inner = self._guard
        self._guard = None
        if inner is not None:
            try:
                inner.close()
            finally:
                self._past += inner.incidents
                self._run.close()

    # --- what the Trainer does ---

    def _training_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if self._guard is not None:
                loss_fn = functools.partial(self._step.loss, self._trainer.state.global_step, model)
                self._guard.port.micro(loss_fn, self._step.batch(inputs, num_items_in_batch))
            loss = original(model, inputs, num_items_in_batch)
            self._losses.add(loss)
            return loss

        return training_step

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if self._guard is not None:
                if "loss" in logs:
                    self._correct(logs)
                logs[INCIDENTS] = len(self.incidents)
            return original(logs, *args, **kwargs)

        return log

    def _correct(self, logs: dict[str, Any]) -> None:
        step, known = self._logged
        if "learning_rate" in logs and self._guard is not None:
            # the Trainer's own line, which every rank writes: they read a fused step together
            self._guard.port.settle()
        incidents = self.incidents
        now = self._trainer.state.global_step
        losses = [i.reading.loss for i in incidents[known:] if i.reading.loss is not None]
        bad = len(losses) - sum(map(math.isfinite, losses))
        correct(logs, self._losses.take(), max(now - step, 1), bad)
        self._logged = (now, len(incidents))
        total = getattr(self._trainer, "_tr_loss", None)
        if total is not None:
            # transformers empties the sum by subtracting it from itself, which a NaN survives.
            total.nan_to_num_(nan=0.0)

    # --- what is stored ---

    def _look(self, together: bool) -> tuple[str, ...]:
        """Non-finite stored tensors, once the last step has been read."""
        if self._guard is not None:
            self._guard.port.settle()
        if self._last is None:
            return bad_tensors(self._trainer.model)
        return self._last.port.trouble(together=together and self._guard is not None)

    def _hurt(self) -> bool:
        """Do the loss, or incidents since the last call, show that the weights are bad?"""
        incidents = self.incidents
        fresh = incidents[self._judged :]
        self._judged = len(incidents)
        if any(map(_hurts, fresh)):
            return True
        return self._last is not None and not self._last.port.good

    def _say(self, summary: str) -> None:
        if self._last is not None:
            self._last.port.say("save-refused", summary)


class _Follow(TrainerCallback):  # type: ignore[misc]
    """Tells the guard when a `train()` is ready to begin, and when it is over."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()


def _settings(trainer: Any, config: GuardConfig) -> GuardConfig:
    """What the Trainer does by itself is taken from its arguments."""
    clip = trainer.args.max_grad_norm or None
    if config.clip_norm is not None and config.clip_norm != clip:
        raise ConfigError(
            f"GuardConfig.clip_norm={config.clip_norm!r}, but the Trainer clips by itself with "
            f"max_grad_norm={clip!r}; set TrainingArguments(max_grad_norm={config.clip_norm!r}) "
            "and leave clip_norm out."
        )
    if config.loss_scale is not None:
        raise ConfigError(
            f"GuardConfig.loss_scale={config.loss_scale!r} is for guard.step; the Trainer scales "
            f"its loss by itself."
        )
    labels = "labels" if "labels" in (getattr(trainer, "label_names", None) or ()) else None
    return replace(config, clip_norm=clip, labels_key=config.labels_key or labels)


def _hurts(incident: Incident) -> bool:
    """Have finite weights lost what they learned? Their checkpoint does not show it."""
    return incident.verdict.kind in ("spike", "drift")


def _wind_up(trainer: Any) -> None:
    """End a halted run as others end: gradients dropped, loggers flushed, bars closed."""
    trainer.control.should_training_stop = True
    trainer.model_wrapped.zero_grad()
    # Whatever a logger of the user's raises, the halt is what must be seen.
    with suppress(Exception):
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    trainer.is_in_train = False


def _remove(callbacks: list[Any], callback: Any) -> None:
    if callback in callbacks:
        callbacks.remove(callback)
