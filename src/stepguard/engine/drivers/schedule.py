"""The schedule advances only when the optimizer really stepped: a step found bad afterwards takes
it back.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

LENGTH_KEYS = ("total_steps", "T_max", "total_iters")
RATES = ("lr", "initial_lr", "max_lr", "min_lr")


class SeveralSchedules:
    """A list of schedulers in the place of one; they advance in the order they were given in."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = list(schedulers)

    def step(self) -> None:
        for scheduler in self._schedulers:
            advance(scheduler)

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


def one_schedule(given: Any) -> Any:
    """What the user gave as `scheduler`: nothing, one scheduler, or several."""
    if not isinstance(given, list | tuple):
        return given
    if len(given) < 2:
        return given[0] if given else None
    return SeveralSchedules(given)


def scheduler_of(optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler that drives this optimizer; the outermost where schedulers are chained."""
    ours = [s for s in gc.get_objects() if _drives(s, optimizer)]
    nested: set[int] = set()
    for scheduler in ours:
        # SequentialLR and ChainedScheduler keep the schedulers inside them under this name.
        nested.update(map(id, getattr(scheduler, "_schedulers", ())))
    outer = [s for s in ours if id(s) not in nested]
    return outer[0] if len(outer) == 1 else None


def _drives(item: Any, optimizer: Optimizer) -> bool:
    # type() and not isinstance: proxies answer isinstance with side effects
    return issubclass(type(item), LRScheduler) and getattr(item, "optimizer", None) is optimizer


def advance(scheduler: Any) -> list[str]:
    """One step of every scheduler that needs nothing for it; the names of those that do, which stay
    where they are.
    """
    if isinstance(scheduler, SeveralSchedules):
        return [name for one in scheduler._schedulers for name in advance(one)]
    if wants_a_value(scheduler):
        return [type(scheduler).__name__]
    scheduler.step()
    return []


def wants_a_value(scheduler: Any) -> bool:
    """Can it not be stepped without an argument? `ReduceLROnPlateau` wants a metric, timm's
    schedulers an epoch.
    """
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in by_position for p in parameters)


def named_position(scheduler: Any) -> str:
    """`OneCycleLR at 33 of 100`; empty without a schedule that counts."""
    for member in members(scheduler):
        if member is not None and hasattr(member, "last_epoch"):
            said = f"{type(member).__name__} at {member.last_epoch}"
            for key in LENGTH_KEYS:
                if isinstance(getattr(member, key, None), int):
                    return f"{said} of {getattr(member, key)}"
            return said
    return ""


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
    return [
        scheduler,
        *(m for inner in getattr(scheduler, "_schedulers", ()) for m in members(inner)),
    ]


def put_setting(group: dict[str, Any], key: str, value: Any) -> None:
    """A learning rate that is a tensor keeps its identity: compiled optimizers hold on to it."""
    if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
        group[key].copy_(value)
    else:
        group[key] = value


def scale_rates(optimizer: Optimizer, scheduler: Any, factors: Sequence[float]) -> None:
    """Multiply each group's learning rates, and what schedulers derive theirs from."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for key in RATES:
            if isinstance(group.get(key), int | float | Tensor):
                put_setting(group, key, group[key] * factor)
    for member in members(scheduler):
        if hasattr(member, "base_lrs"):
            pairs = zip(member.base_lrs, factors, strict=False)
            member.base_lrs = [rate * factor for rate, factor in pairs]
