"""Weaker guards for a Trainer: a callback, and a `compute_loss` that drops bad micro-batches.

A callback is never shown the batch or the loss function, so a bad step cannot be run again from
batch to loss, and it cannot refuse `trainer.save_model()`.
`stepguard.integrations.transformers.guard(trainer)` can do both.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from stepguard._errors import ConfigError
from stepguard.engine.context import guarded
from stepguard.guard import Guard
from stepguard.integrations._parts import hold_schedule
from stepguard.records import GuardConfig, Incident, Reading, Sink
from stepguard.report.phrases import count
from stepguard.report.sinks import INCIDENTS, NONFINITE
from stepguard.tensors.names import optimizer_parameters
from stepguard.watching import watch_for

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


class GradientMonitoringCallback(TrainerCallback):  # type: ignore[misc]
    """Vetoes updates with NaN or Inf before the optimizer, and reports what a log line hides.

    Gradients are gone when `on_step_end` runs, so they are checked inside `optimizer.step()`;
    `on_step_end` checks the parameters, which the update itself may have made non-finite. Where
    the Trainer has a guard already, the callback only reports.
    """

    def __init__(self, config: GuardConfig | None = None) -> None:
        self._config = config or GuardConfig()
        self._guard: Guard | None = None
        self._past: tuple[Incident, ...] = ()
        self._undo = ExitStack()
        self._known = 0
        self._zeros = ZeroLosses()
        self.reported: Counter[str] = Counter()
        """Log lines by what was wrong with them: `grad_norm`, `loss`; steps whose loss was exactly
        0: `zero_loss`; updates that made parameters non-finite: `parameters`."""

    @property
    def incidents(self) -> tuple[Incident, ...]:
        if self._guard is None:
            return self._past
        return self._past + self._guard.incidents

    def close(self) -> None:
        """Undo every hook. Happens by itself at the end of training."""
        inner = self._guard
        self._guard = None
        if inner is not None:
            try:
                inner.close()
            finally:
                self._past += inner.incidents
                self.reported["zero_loss"] += self._zeros.steps
                self._zeros.steps = 0
        self._undo.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        optimizer = kwargs["optimizer"]
        if getattr(optimizer, "optimizer", optimizer) in guarded:
            return
        self._guard = watch_for(
            "transformers",
            kwargs["model"],
            optimizer,
            scheduler=kwargs["lr_scheduler"],
            config=replace(self._config, sinks=(*self._config.sinks, self._zeros)),
        )
        self._guard.port.start_at(state.global_step)
        if hasattr(optimizer, "step_was_skipped"):
            hold_schedule(optimizer, self._guard, self._undo)
        self._guard.port.say("callback-only", UNSEEN)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Refuse to save parameters that this update has made non-finite."""
        if self._guard is not None and not self._guard.port.finite():
            self.reported["parameters"] += 1
            bad = ", ".join(self._guard.port.trouble()[:3])
            self._guard.port.say(
                "parameters",
                f"the update made parameters non-finite ({bad}); not saving this state",
            )
            control.should_save = False
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report what the line hides: a filtered NaN looks like a loss of 0, and a loss that is
        really 0 teaches nothing.
        """
        if not isinstance(logs, dict) or "loss" not in logs:
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
        if self._guard is not None:
            zeros, self._zeros.steps = self._zeros.steps, 0
        self.reported["zero_loss"] += zeros
        if self._guard is not None and hidden and math.isfinite(logged):
            self._guard.port.say(
                "filtered",
                f"logged loss {logged:.4g} is filtered (logging_nan_inf_filter): the loss was "
                f"{hidden[0].reading.loss} at step {hidden[0].step}",
            )
        if self._guard is not None and zeros:
            self._guard.port.say(
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
    """A micro-batch had no label, or a loss that is not finite, and was left out of its step."""


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
