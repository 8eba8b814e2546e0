"""The schedule advances only when the optimizer really stepped: a step found bad afterwards takes it back."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class ScheduleCopy:
    """A scheduler and the hyperparameters it writes, at one moment."""

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._position = position(scheduler)
        self._state = copy.deepcopy(scheduler.state_dict())
        self._groups = [hyperparameters(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Back to that moment. Nothing happens when the scheduler has not moved since."""
        if position(self._scheduler) == self._position:
            return
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key, value in saved.items():
                put_setting(group, key, value)


def position(scheduler: LRScheduler) -> tuple[int, ...]:
    """How far a scheduler, and those it is made of, have come."""
    return tuple(getattr(s, "last_epoch", 0) for s in members(scheduler))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Everything of a parameter group but the parameters."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def members(scheduler: Any) -> list[Any]:
    """SequentialLR and ChainedScheduler hold further ones."""
    return [scheduler, *(m for inner in getattr(scheduler, "_schedulers", ()) for m in members(inner))]


def put_setting(group: dict[str, Any], key: str, value: Any) -> None:
    """A learning rate that is a tensor keeps its identity: compiled optimizers hold on to it."""
    if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
        group[key].copy_(value)
    else:
        group[key] = value
