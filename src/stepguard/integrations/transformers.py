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
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import ConfigError, SaveRefused, StepguardError, TrainingHalted
from stepguard.diagnose.rules.sg900 import CLIPPED, EQUAL_REWARDS, LOGP_DIFFERENCE, ON_POLICY
from stepguard.engine.context import guarded
from stepguard.engine.incident.closer_look import bad_tensors
from stepguard.guard import Guard
from stepguard.integrations._engine import EngineGuard
from stepguard.integrations._parts import Framework, HostGuard, around
from stepguard.records import GuardConfig, Reading, Sink
from stepguard.report.phrases import count
from stepguard.report.sinks import INCIDENTS, NONFINITE
from stepguard.tensors.names import optimizer_parameters, swapped

TRANSFORMERS = Framework("transformers", first="5.2", before="6.0", tested="5.22.2")
TRANSFORMERS.require()

import transformers.trainer  # noqa: E402 (first the version, then what that version must have)
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints  # noqa: E402

TRANSFORMERS.need(transformers.trainer, "rotate_checkpoints")

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
    return TrainerGuard(trainer, _settings(trainer, config or GuardConfig()))


class TrainerGuard(HostGuard, TrainerCallback):  # type: ignore[misc]
    """Guards one Trainer. A context manager; built by `guard`."""

    def __init__(self, trainer: Any, config: GuardConfig) -> None:
        super().__init__()
        self._trainer = trainer
        self._config = config
        self._losses = TrueLoss()
        self._logged = (0, 0)
        """Global step and number of incidents at the last log line."""
        self._judged = 0
        """Incidents that checkpoints have been judged by."""
        self._step = TrainingStep(trainer, trainer.training_step)
        self._signals = RewardSignals(trainer) if RewardSignals.computed_by(trainer) else None
        self._saving = False
        self.refused_saves = 0
        """Checkpoints and models that were not written because the state was bad."""
        self._fresh: Path | None = None
        """The newest checkpoint, if the run was healthy when it was written; not proven yet."""
        self._proven: Path | None = None
        """The newest one that healthy steps have followed, or that was resumed from."""
        for name in WRAPPED:
            around(self._undo, trainer, name, getattr(self, f"_{name.strip('_')}"))
        callbacks = trainer.callback_handler.callbacks
        # After DefaultFlowCallback, which decides the flow, and before the loggers.
        callbacks.insert(1, self)

        def unfollow() -> None:
            if self in callbacks:
                callbacks.remove(self)

        self._undo.callback(unfollow)
        _guarded.add(trainer)
        self._undo.callback(_guarded.discard, trainer)

    @property
    def last_good(self) -> Path | None:
        """The newest checkpoint, written or resumed from, that no later step speaks against."""
        if self._hurt():
            self._fresh = None
        return self._fresh or self._proven

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
            self.end_run()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Model, optimizer and schedule are prepared and loaded; nothing has been trained yet."""
        self.begin_run()
        trainer = self._trainer
        self._losses = TrueLoss()
        if trainer.is_deepspeed_enabled:
            from stepguard.integrations import deepspeed

            # the engine clips by the same max_grad_norm
            config = replace(self._config, clip_norm=None)
            self.adopt(deepspeed.guard(trainer.model_wrapped, config))
        else:
            self.watch(
                "transformers",
                trainer.model_wrapped,
                trainer.optimizer,
                done=trainer.state.global_step,
                scheduler=trainer.lr_scheduler,
                scaler=trainer.accelerator.scaler,
                config=self._config,
            )
        self.guards[0].port.reads_text_with(getattr(trainer, "processing_class", None))
        self._logged = (trainer.state.global_step, len(self.incidents))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if isinstance(logs, dict):
            self.logged(logs, state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.end_run()

    # --- what the Trainer does ---

    def _training_step(
        self, original: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        if self.running:
            loss_fn = functools.partial(self._step.loss, self._trainer.state.global_step, model)
            self.guards[0].port.micro(loss_fn, self._step.batch(inputs, num_items_in_batch))
        loss = original(model, inputs, num_items_in_batch)
        self._losses.add(loss)
        if self._signals is not None and self.running:
            self._signals.follow(self.guards[0])
        return loss

    def _log(
        self, original: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.running:
            if "loss" in logs:
                self._correct(logs)
            logs[INCIDENTS] = len(self.incidents)
        return original(logs, *args, **kwargs)

    def _correct(self, logs: dict[str, Any]) -> None:
        step, known = self._logged
        if "learning_rate" in logs:
            # the Trainer's own line, which every rank writes: they read a fused step together
            self.settle()
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

    def _refused(self, what: str, *, together: bool) -> SaveRefused | None:
        """Why the state must not be written, once the last step has been read."""
        self.settle()
        refused = None
        if self.guards:
            refused = self.refusal(what, together=together and self.running)
        elif bad := bad_tensors(self._trainer.model):
            refused = SaveRefused(what, bad)
        self.refused_saves += refused is not None
        return refused

    def _hurt(self) -> bool:
        """Do the loss, or incidents since the last call, show that the weights are bad?"""
        incidents = self.incidents
        fresh = incidents[self._judged :]
        self._judged = len(incidents)
        # Finite weights that have lost what they learned: their checkpoint does not show it.
        if any(incident.verdict.kind in ("spike", "drift") for incident in fresh):
            return True
        return bool(self.guards) and not self.guards[0].port.good

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        where = f"checkpoint-{self._trainer.state.global_step}"
        if self._refused(where, together=True):
            return None
        self._saving = True
        try:
            with swapped(transformers.trainer, "rotate_checkpoints", self._rotate):
                return original(*args, **kwargs)
        finally:
            self._saving = False

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refused = None if self._saving else self._refused("the model", together=False)
        if refused is not None:
            raise refused
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


def to_delete(sorted_checkpoints: Sequence[str], keep: int, protected: set[Path]) -> list[str]:
    """The oldest ones beyond `keep`, never the newest and never a protected one."""
    newest = map(Path, sorted_checkpoints[-1:])
    kept = {path.resolve() for path in (*protected, *newest)}
    others = [path for path in sorted_checkpoints if Path(path).resolve() not in kept]
    room = max(0, keep - (len(sorted_checkpoints) - len(others)))
    return others[: max(0, len(others) - room)]


def _settings(trainer: Any, config: GuardConfig) -> GuardConfig:
    """What the Trainer does by itself is taken from its arguments."""
    clip = trainer.args.max_grad_norm or None
    if config.clip_norm is not None and config.clip_norm != clip:
        raise ConfigError(
            f"GuardConfig.clip_norm={config.clip_norm!r}, but the Trainer clips by itself with "
            f"max_grad_norm={clip!r}; set TrainingArguments(max_grad_norm={config.clip_norm!r}) "
            "and remove clip_norm."
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
        self._kept: list[Tensor] = []

    def add(self, loss: Any) -> None:
        """What a training step returned."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._kept.append(loss.detach().reshape(1))
        if len(self._kept) >= FOLD:
            self._kept = [torch.cat(self._kept)]

    def take(self) -> list[float]:
        """Read all of them from the device, and forget them."""
        values: list[float] = []
        for part in self._kept:
            values += part.float().tolist()
        self._kept = []
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


# --- What TRL's GRPO and RLOO trainers compute of rewards, ratios and entropy, for SG926.


SIGNALS = (EQUAL_REWARDS, LOGP_DIFFERENCE, CLIPPED, "kl", "entropy", "reward")


class RewardSignals:
    """Follows the newest value of each, before the trainer averages them over its log line."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._seen: dict[str, tuple[Any, int]] = {}
        """The list of each log line, and how many of its values were followed already."""

    @staticmethod
    def computed_by(trainer: Any) -> bool:
        """Does this trainer sample several completions of a prompt and compare their rewards?"""
        needed = ("_metrics", "_step", "num_iterations", "num_generations")
        return all(hasattr(trainer, name) for name in needed)

    def follow(self, guard: Guard | EngineGuard) -> None:
        """A micro-batch is over."""
        trainer = self._trainer
        metrics = trainer._metrics["train"]
        for name in SIGNALS:
            values = metrics.get(name)
            before, count = self._seen.get(name, (None, 0))
            # a new line has a new list, which may be as long as the one before
            if not values or (values is before and len(values) == count) or values[-1] is None:
                continue
            self._seen[name] = values, len(values)
            guard.follow(name, values[-1])
            if name == CLIPPED and self._on_policy():
                guard.follow(ON_POLICY, values[-1])

    def _on_policy(self) -> bool:
        """Have the weights at hand sampled the micro-batch that is just over?"""
        arguments = self._trainer.args
        place = (self._trainer._step - 1) % (
            arguments.steps_per_generation * self._trainer.num_iterations
        )
        return bool(place < arguments.gradient_accumulation_steps)


# --- Choose the half precision that this machine is fast in.


CPU_SIGNS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def half_precision() -> dict[str, bool]:
    """For `TrainingArguments(**half_precision())`: bf16 in hardware, else fp16 on a GPU, else {}.

    fp16 overflows at 65504 and needs the loss scaling that the Trainer then turns on; bf16 has the
    range of float32 and 8 bits. On a CPU transformers takes bf16 only together with `use_cpu`.
    """
    if torch.cuda.is_available():
        # By default this also says yes where bf16 is only emulated, which is slow.
        in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
        return {"bf16": True} if in_hardware else {"fp16": True}
    if torch.accelerator.is_available():
        return {}  # neither CUDA nor ROCm: nothing is known about its half precision
    for sign in CPU_SIGNS:
        supported = getattr(torch.cpu, sign, None)
        if supported is not None and supported():
            return {"bf16": True, "use_cpu": True}
    return {}


# --- Weaker guards for a Trainer: a callback, and a `compute_loss` that drops bad micro-batches.

UNSEEN = (
    "GradientMonitoringCallback vetoes bad updates, but it sees neither the batch nor the loss "
    "function and cannot refuse trainer.save_model(); "
    "stepguard.integrations.transformers.guard(trainer) can"
)
IGNORED = -100


class ZeroLosses(Sink):
    """Counts steps whose loss is exactly 0."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, reading: Reading, committed: bool) -> None:
        self.steps += reading.loss == 0.0


class GradientMonitoringCallback(HostGuard, TrainerCallback):  # type: ignore[misc]
    """Vetoes updates with NaN or Inf before the optimizer, and reports what a log line hides.

    Gradients are gone when `on_step_end` runs, so they are checked inside `optimizer.step()`;
    `on_step_end` checks the parameters, which the update itself may have made non-finite. Where
    the Trainer has a guard already, the callback only reports.
    """

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._config = config or GuardConfig()
        self._known = 0
        self._zeros = ZeroLosses()
        self.reported: Counter[str] = Counter()
        """Log lines by what was wrong with them: `grad_norm`, `loss`; steps whose loss was exactly
        0: `zero_loss`; updates that made parameters non-finite: `parameters`."""

    def end_run(self) -> None:
        super().end_run()
        self.reported["zero_loss"] += self._zeros.steps
        self._zeros.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_run()
        optimizer = kwargs["optimizer"]
        if getattr(optimizer, "optimizer", optimizer) in guarded:
            return
        inner = self.watch(
            "transformers",
            kwargs["model"],
            optimizer,
            done=state.global_step,
            scheduler=kwargs["lr_scheduler"],
            config=replace(self._config, sinks=(*self._config.sinks, self._zeros)),
        )
        inner.port.say("callback-only", UNSEEN)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Refuse to save parameters that this update has made non-finite."""
        if self.running and not self.guards[0].port.finite():
            self.reported["parameters"] += 1
            port = self.guards[0].port
            bad = ", ".join(port.trouble()[:3])
            port.say(
                "parameters",
                f"the update made parameters non-finite ({bad}); not saving this state",
            )
            control.should_save = False
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report what the line hides: a filtered NaN looks like a loss of 0, and a loss that is
        really 0 teaches nothing.
        """
        if not isinstance(logs, dict):
            return
        self.logged(logs, state.global_step)
        if "loss" not in logs:
            return
        logged = logs["loss"]
        bad_norm = not math.isfinite(float(logs.get("grad_norm", 0.0)))
        incidents = self.incidents
        hidden = []
        for incident in incidents[self._known :]:
            loss = incident.reading.loss
            if loss is not None and math.isnan(loss):
                hidden.append(incident)
        self._known = len(incidents)
        self.reported["grad_norm"] += bad_norm
        self.reported["loss"] += bool(hidden)
        # Where the Trainer has a guard of its own, that one has corrected the line.
        zeros = int(logged == 0.0)
        if self.running:
            zeros, self._zeros.steps = self._zeros.steps, 0
        self.reported["zero_loss"] += zeros
        if self.running and hidden and math.isfinite(logged):
            self.guards[0].port.say(
                "filtered",
                f"logged loss {logged:.4g} is filtered (logging_nan_inf_filter): the loss was "
                f"{hidden[0].reading.loss} at step {hidden[0].step}",
            )
        if self.running and zeros:
            self.guards[0].port.say(
                "zero_loss",
                f"the loss of {count(zeros, 'step')} since the last log line is exactly 0, not a "
                "filtered NaN: nothing is learned from it (SG803: stepguard explain SG803)",
            )
        logs[INCIDENTS] = len(incidents)
        if bad_norm or hidden:
            logs[NONFINITE] = max(len(hidden), 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()


class MicroBatchDropped(UserWarning):
    """A micro-batch had no label, or a loss that is not finite, and was dropped from its step."""


_dropped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Micro-batches of each Trainer so far."""


def safe_compute_loss(
    trainer: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """`compute_loss` that never hides a bad micro-batch and never trains on one.

        trainer.compute_loss = functools.partial(safe_compute_loss, trainer)

    | the micro-batch | what happens |
    |---|---|
    | no label counts (all -100) | dropped with a warning: the loss is a zero that every parameter
      is part of, as DDP needs it |
    | the model gives no loss | ConfigError that names the keys of the batch |
    | the loss is NaN or Inf | dropped likewise; a guarded Trainer gets the loss as it is, and its
      guard vetoes |
    | the loss is exactly 0 | as it is: a true zero is not a fault, and replacing it by 1e-6 would
      train nothing |

    Where a whole step was dropped on all ranks its update does not happen, momentum and weight
    decay included.
    """
    found: Any = (None,)
    try:
        found = type(trainer).compute_loss(
            trainer, model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )
    except ValueError as error:
        if "did not return a loss" not in str(error):
            raise
    loss = found[0] if isinstance(found, tuple) else found
    if loss is None:
        keys = ", ".join(map(repr, inputs))
        if "labels" not in inputs:
            keys += ": no 'labels' in it"
        raise ConfigError(
            f"the model gave no loss for a batch with {keys}; "
            "add the targets as 'labels', or give the Trainer a compute_loss_func."
        )
    # the torch optimizer inside accelerate's wrapper
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    value = float(loss.detach())
    why = ""
    if isinstance(labels, Tensor) and not bool((labels != IGNORED).any()):
        why = f"none of its {labels.numel()} labels counts (all are {IGNORED})"
    elif not math.isfinite(value):
        why = f"its loss is {value}"
    if why and torch.is_grad_enabled() and model.training and optimizer not in guarded:
        loss = _drop(trainer, model, optimizer, why)
    return (loss, *found[1:]) if return_outputs else loss


def _drop(trainer: Any, model: Any, optimizer: Any, why: str) -> Tensor:
    """A loss of 0 that every parameter is part of; NaN where a parameter is NaN."""
    _dropped[trainer] = times = _dropped.get(trainer, 0) + 1
    power_of_two = times & (times - 1) == 0
    if power_of_two:
        message = (
            f"stepguard: micro-batch dropped at step {trainer.state.global_step} ({times} so "
            f"far): {why}"
        )
        warnings.warn(message, MicroBatchDropped, stacklevel=3)

    def skip(*_: Any) -> None:
        """Skip the next update if all gradients are exactly 0, on every rank after reduction."""
        hook.remove()
        parameters: list[Any] = [p for p in optimizer_parameters(optimizer) if p.grad is not None]
        if not any(bool(p.grad.count_nonzero()) for p in parameters):
            for parameter in parameters:
                parameter.grad = None

    hook = optimizer.register_step_pre_hook(skip)
    zeros = [(p * 0.0).sum() for p in model.parameters() if p.requires_grad]
    total: Tensor = sum(zeros[1:], start=zeros[0])
    return total.float()
