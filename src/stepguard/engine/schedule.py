"""The schedule advances only when the optimizer really stepped: a step found bad afterwards takes it back."""

from __future__ import annotations

import copy
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class ScheduleCopy:
    """A scheduler and the hyperparameters it writes, at one moment."""

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._state = copy.deepcopy(scheduler.state_dict())
        self._groups = [hyperparameters(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Back to that moment. Nothing happens when the scheduler has not moved since."""
        if self._scheduler.state_dict().get("last_epoch") == self._state.get("last_epoch"):
            return
        self._scheduler.load_state_dict(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Everything of a parameter group but the parameters."""
    return {key: copy.copy(value) for key, value in group.items() if key != "params"}


def lower_lr(optimizer: Optimizer, scheduler: LRScheduler | None, factor: float) -> None:
    """Multiply every learning rate, and what schedulers derive theirs from, by `factor`."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if key in group:
                group[key] = group[key] * factor
    if scheduler is not None and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
