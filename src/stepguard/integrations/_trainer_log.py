"""Correct the loss that a Trainer logs: transformers shows a NaN as 0.0 or as the others' mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FOLD = 512
"""Losses kept one by one before they are put into one tensor."""
INCIDENTS = "stepguard/incidents"
NONFINITE = "stepguard/nonfinite"
LOSS_FINITE = "stepguard/loss_finite"


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
