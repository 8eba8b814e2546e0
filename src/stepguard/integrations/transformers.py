"""stepguard inside transformers: `guard(trainer)` for Trainer and subclasses such as SFTTrainer.

    guard = stepguard.integrations.transformers.guard(trainer)
    trainer.train()

Instances are wrapped, no class is changed or subclassed. The weaker callback-only form is
`GradientMonitoringCallback`.
"""

from __future__ import annotations

import copy
import functools
import math
import shutil
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import ConfigError, SaveRefused, StepguardError, TrainingHalted
from stepguard.engine.incident.closer_look import bad_tensors
from stepguard.guard import Guard
from stepguard.integrations._parts import (
    Framework,
    HostGuard,
    around,
    half_precision,
    hold_schedule,
    to_delete,
)
from stepguard.records import GuardConfig, Incident
from stepguard.report.sinks import INCIDENTS, NONFINITE
from stepguard.tensors.names import swapped
from stepguard.watching import watch_for

TRANSFORMERS = Framework("transformers", first="5.2", before="6.0", tested="5.22.2")
TRANSFORMERS.require()

import transformers.trainer  # noqa: E402 (first the version, then what that version must have)
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints  # noqa: E402

TRANSFORMERS.need(transformers.trainer, "rotate_checkpoints")

from stepguard.integrations._monitoring import GradientMonitoringCallback, safe_compute_loss  # noqa: E402

__all__ = [
    "GradientMonitoringCallback",
    "SaveRefused",
    "TrainerGuard",
    "guard",
    "half_precision",
    "safe_compute_loss",
]

WRAPPED = ("train", "training_step", "log", "save_model", "_save_checkpoint")
ITEMS = "num_items_in_batch"
LARGE = 10_000
"""Containers with more elements hold data, not metrics."""
FOLD = 512
"""Losses kept one by one before they are put into one tensor."""
LOSS_FINITE = "stepguard/loss_finite"
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


class TrainerGuard(HostGuard):
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
        self._saving = False
        self.refused_saves = 0
        """Checkpoints and models that were not written because the state was bad."""
        self._fresh: Path | None = None
        """The newest checkpoint, if the run was healthy when it was written; not proven yet."""
        self._proven: Path | None = None
        """The newest one that healthy steps have followed, or that was resumed from."""
        around(self._undo, trainer, "train", self._train)
        around(self._undo, trainer, "training_step", self._training_step)
        around(self._undo, trainer, "log", self._log)
        around(self._undo, trainer, "_save_checkpoint", self._save_checkpoint)
        around(self._undo, trainer, "save_model", self._save_model)
        callbacks = trainer.callback_handler.callbacks
        follow = _Follow(self._begin, self._end)
        # After DefaultFlowCallback, which decides the flow, and before the loggers.
        callbacks.insert(1, follow)

        def unfollow() -> None:
            if follow in callbacks:
                callbacks.remove(follow)

        self._undo.callback(unfollow)
        _guarded.add(trainer)
        self._undo.callback(_guarded.discard, trainer)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident of every `train()` so far, oldest first."""
        if self._guard is None:
            return self._past
        return self._past + self._guard.incidents

    @property
    def last_good(self) -> Path | None:
        """The newest checkpoint, written or resumed from, that no later step speaks against."""
        if self._hurt():
            self._fresh = None
        return self._fresh or self._proven

    def close(self) -> None:
        """Read what is pending and undo every wrap. Safe to call twice."""
        try:
            self._detach()
        finally:
            self._undo.close()

    # --- one call of train() ---

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        resumed = args[0] if args else kwargs.get("resume_from_checkpoint")
        if resumed is True:
            resumed = get_last_checkpoint(self._trainer.args.output_dir)
        self._fresh = self._proven = None
        if resumed:
            self._proven = Path(resumed)
        try:
            return original(*args, **kwargs)
        except TrainingHalted:
            # End as other runs end: gradients dropped, loggers flushed, bars closed.
            trainer = self._trainer
            trainer.control.should_training_stop = True
            trainer.model_wrapped.zero_grad()
            # Whatever a logger of the user's raises, the halt is what must be seen.
            with suppress(Exception):
                trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            trainer.is_in_train = False
            raise
        finally:
            self._detach()

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

    def _training_step(
        self, original: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        if self._guard is not None:
            loss_fn = functools.partial(self._step.loss, self._trainer.state.global_step, model)
            self._guard.port.micro(loss_fn, self._step.batch(inputs, num_items_in_batch))
        loss = original(model, inputs, num_items_in_batch)
        self._losses.add(loss)
        return loss

    def _log(
        self, original: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._guard is not None:
            if "loss" in logs:
                self._correct(self._guard, logs)
            logs[INCIDENTS] = len(self.incidents)
        return original(logs, *args, **kwargs)

    def _correct(self, guard: Guard, logs: dict[str, Any]) -> None:
        step, known = self._logged
        if "learning_rate" in logs:
            # the Trainer's own line, which every rank writes: they read a fused step together
            guard.port.settle()
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

    # --- what is stored: no bad state is written, no last good one deleted ---

    def _bad_tensors(self, *, together: bool) -> tuple[str, ...]:
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
        # Finite weights that have lost what they learned: their checkpoint does not show it.
        if any(incident.verdict.kind in ("spike", "drift") for incident in fresh):
            return True
        return self._last is not None and not self._last.port.good

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bad = self._bad_tensors(together=True)
        if bad:
            self.refused_saves += 1
            where = f"checkpoint-{self._trainer.state.global_step}"
            if self._last is not None:
                self._last.port.say("save-refused", str(SaveRefused(where, bad)))
            return None
        self._saving = True
        try:
            with swapped(transformers.trainer, "rotate_checkpoints", self._rotate):
                return original(*args, **kwargs)
        finally:
            self._saving = False

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._saving:
            bad = self._bad_tensors(together=False)
            if bad:
                self.refused_saves += 1
                raise SaveRefused("the model", bad)
        return original(*args, **kwargs)

    def _rotate(
        self,
        output_dir: str,
        save_total_limit: int | None = None,
        best_model_checkpoint: str | None = None,
        use_mtime: bool = False,
    ) -> None:
        """Replaces transformers' own, which keeps the best checkpoint but not the last good one."""
        checkpoints = sort_checkpoints(output_dir, use_mtime=use_mtime)
        # Healthy steps since the last checkpoint prove that one; the newest waits for its own.
        if self._hurt():
            self._fresh = None
        else:
            self._proven = self._fresh or self._proven
            self._fresh = Path(output_dir, f"checkpoint-{self._trainer.state.global_step}")
        if save_total_limit is None or save_total_limit <= 0:
            return
        protected = set()
        for kept in (self._proven, best_model_checkpoint):
            if kept is not None:
                protected.add(Path(kept))
        for checkpoint in to_delete(checkpoints, save_total_limit, protected):
            shutil.rmtree(checkpoint, ignore_errors=True)


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


class NoBackwardError(StepguardError):
    """The Trainer's training_step never called backward, so that its loss is not known."""


class TrainingStep:
    """The loss that one Trainer is about to call backward on, also of a subclass of Trainer."""

    def __init__(self, trainer: Any, training_step: Callable[..., Any]) -> None:
        self._trainer = trainer
        self._training_step = training_step

    def batch(self, inputs: Any, items: Any) -> Any:
        """What `loss` takes: the inputs together with the number of items."""
        batch = copy.copy(inputs)
        if items is not None and isinstance(batch, MutableMapping):
            batch[ITEMS] = items
        return batch

    def loss(self, step: int, model: Any, batch: Any) -> Tensor:
        """Run training_step as at global step `step`; backward only keeps what it is called on."""
        accelerator = self._trainer.accelerator
        state = self._trainer.state
        roots: list[Tensor] = []

        def keep(loss: Tensor, **_: Any) -> None:
            roots.append(loss / accelerator.gradient_accumulation_steps)

        def keep_direct(tensors: Any, *_: Any, **__: Any) -> None:
            roots.extend([tensors] if isinstance(tensors, Tensor) else tensors)

        with (
            kept(self._trainer),
            swapped(state, "global_step", step),
            swapped(accelerator, "backward", keep),
            # A training_step of the user's may call loss.backward() itself.
            swapped(torch.autograd, "backward", keep_direct),
        ):
            inputs = copy.copy(batch)
            items = inputs.pop(ITEMS, None) if isinstance(inputs, MutableMapping) else None
            self._training_step(model, inputs, items)
        if not roots:
            raise NoBackwardError(
                f"{type(self._trainer).__name__}.training_step called no backward."
            )
        return sum(roots[1:], start=roots[0])


@contextmanager
def kept(trainer: Any) -> Iterator[None]:
    """Put attributes back, and the content of lists and dicts: trainers keep metrics there."""
    own = vars(trainer)
    inside: list[tuple[Any, Any]] = [(own, dict(own))]
    for name, value in own.items():
        if name not in ("train_dataset", "eval_dataset"):
            inside.extend(_contents(value))
    try:
        yield
    finally:
        for container, content in inside:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and dict that is reached through lists and dicts, each with a shallow copy."""
    if not isinstance(value, dict | list) or len(value) > LARGE:
        return
    yield value, copy.copy(value)
    for item in value.values() if isinstance(value, dict) else value:
        yield from _contents(item)


class TrueLoss:
    """The losses since the last log line, left on the device until the next one."""

    def __init__(self) -> None:
        self._recent: list[Tensor] = []
        self._folded: list[Tensor] = []

    def add(self, loss: Any) -> None:
        """What a training step returned."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._recent.append(loss.detach().reshape(()))
        if len(self._recent) >= FOLD:
            self._folded.append(torch.stack(self._recent))
            self._recent = []

    def take(self) -> list[float]:
        """Read all of them from the device, and forget them."""
        if self._recent:
            self._folded.append(torch.stack(self._recent))
        values: list[float] = []
        for part in self._folded:
            values += part.float().tolist()
        self._recent = []
        self._folded = []
        return values


def correct(logs: dict[str, Any], losses: Sequence[float], steps: int, bad_elsewhere: int) -> None:
    """Put the true loss of the last `steps` steps into a log line, beside one that is finite.

    `losses` are those of this rank's micro-batches, `bad_elsewhere` the steps that another rank
    made non-finite. A healthy line stays as it is, to the last digit.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    bad = max(len(losses) - len(finite), bad_elsewhere)
    shown = logs["loss"]
    if bad:
        logs["loss"] = sum(losses) / steps if len(finite) < len(losses) else math.nan
        logs[NONFINITE] = bad
        if finite:
            logs[LOSS_FINITE] = sum(finite) / steps * len(losses) / len(finite)
    elif losses and not math.isfinite(shown):
        # With logging_nan_inf_filter=False one NaN stays in the Trainer's sum for ever.
        logs["loss"] = sum(losses) / steps
    norm = logs.get("grad_norm")
    if isinstance(norm, float) and not math.isfinite(norm):
        logs.setdefault(NONFINITE, 1)
