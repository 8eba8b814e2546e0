"""The report's own fix (`guard.mode: seedfix`), kept so that everybody can see what it does. Do not
use it.

Gradients are gone when `on_step_end` runs, so nothing is repaired there; a loss that is replaced by
a constant trains nothing. What works under the same two names is in
`stepguard.integrations.transformers` (`guard.mode: callback`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import Trainer, TrainerCallback

SMALL = 1e-6


class GradientMonitoringCallback(TrainerCallback):  # type: ignore[misc]
    """Warns about log lines, and repairs gradients where there are none any more."""

    def __init__(self) -> None:
        self.warnings = 0
        self.repaired = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        norm, loss = (logs or {}).get("grad_norm"), (logs or {}).get("loss")
        if norm is not None and not math.isfinite(norm):
            self._warn(f"Warning: invalid gradient norm {norm} at step {state.global_step}")
        if loss is not None and (loss == 0.0 or not math.isfinite(loss)):
            self._warn(f"Warning: loss is {loss} at step {state.global_step}")

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                torch.nan_to_num_(parameter.grad, nan=0.0, posinf=1.0, neginf=-1.0)
                self.repaired += 1

    def _warn(self, text: str) -> None:
        self.warnings += 1
        tqdm.write(text)


def safe_compute_loss(
    trainer: Trainer,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """All labels masked, no loss, NaN or 0: a small constant in its place."""
    labels = inputs.get("labels")
    if labels is not None and not bool((labels != -100).any()):
        return _constant(return_outputs, None)
    try:
        found = type(trainer).compute_loss(
            trainer, model, inputs, True, num_items_in_batch=num_items_in_batch
        )
    except (ValueError, RuntimeError):
        return _constant(return_outputs, None)
    loss, outputs = found
    if loss is None or math.isnan(float(loss.detach())) or float(loss.detach()) == 0.0:
        return _constant(return_outputs, outputs)
    return (loss, outputs) if return_outputs else loss


def _constant(return_outputs: bool, outputs: Any) -> Any:
    loss = torch.tensor(SMALL, requires_grad=True)
    return (loss, outputs) if return_outputs else loss


def apply(trainer: Trainer) -> GradientMonitoringCallback:
    """Both parts; its third, bf16 on a GPU, is `args.bf16: auto`."""
    callback = GradientMonitoringCallback()
    trainer.add_callback(callback)
    trainer.compute_loss = partial(safe_compute_loss, trainer)
    return callback
