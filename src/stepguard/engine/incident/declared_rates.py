"""Learning rates that groups and schedules declare, so that a warm-up is not taken for a jump.

Groups say `initial_lr` and `max_lr`, schedulers their bases, peaks and the rate they have just set;
their future is worked out on a copy. None of that is asked on a healthy step: a glance at the
groups now and then is all.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard.engine.drivers.schedule import members, wants_a_value

GLANCE_FIRST, GLANCE_EVERY = 4, 64
"""Steps at which the groups are looked at: the first few, then one in so many."""
FORESEEN = 512
"""Steps of a schedule's future that are worked out."""
LOOKS = 8
"""How often a suspicious rate makes the guard look into the schedule, in one run."""
GROUP_KEYS = ("lr", "initial_lr", "max_lr")
SCHEDULE_KEYS = ("base_lrs", "max_lrs")


def group_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """The learning rate of each group; empty where no group has one, 0 for a group that lacks it."""
    rates = [_number(group.get("lr")) for group in optimizer.param_groups]
    return tuple(rate or 0.0 for rate in rates) if any(rate is not None for rate in rates) else ()


def declared_rates(optimizer: Optimizer, scheduler: Any = None) -> tuple[float, ...]:
    """For each group the highest rate that is declared anywhere: by the group, by its schedule, or
    in its future.
    """
    found = [_stated(optimizer)]
    for one in members(scheduler):
        if one is not None:
            found += [
                _per_group(getattr(one, key, None), len(optimizer.param_groups))
                for key in SCHEDULE_KEYS
            ]
            found.append(_linear_end(one))
    found.append(_future(optimizer, scheduler))
    return _highest(found)


class DeclaredRates:
    """What is declared for one optimizer, remembered from when nothing was suspicious."""

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._known = _highest([_stated(optimizer), _peaks(optimizer, self._schedules())])
        self._bases = self._schedule_bases(self._schedules())
        self._looks = 0

    def known(self, rates: tuple[float, ...], step: int, *, suspicious: bool) -> tuple[float, ...]:
        """The highest declared rate of each group, looked up anew where that is due; empty where it
        is as before.
        """
        if suspicious:
            return self._look_closely(rates)
        if step < GLANCE_FIRST or step % GLANCE_EVERY == 0:
            self._known = _highest([self._known, _stated(self._optimizer)])
            return self._known
        return ()

    def _look_closely(self, rates: tuple[float, ...]) -> tuple[float, ...]:
        """A rate is far above everything known: has the schedule meant it all along?"""
        if self._looks >= LOOKS:
            return self._known
        self._looks += 1
        schedules = self._schedules() or _schedules_of(self._optimizer)
        if not schedules or self._overridden(schedules):
            return self._known
        found = [self._known]
        for scheduler in schedules:
            set_by = _per_group(getattr(scheduler, "_last_lr", None), len(rates))
            if all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(set_by, rates, strict=False)):
                found += [set_by, declared_rates(self._optimizer, scheduler)]
        self._known = _highest(found)
        return self._known

    def _schedules(self) -> list[Any]:
        inner = getattr(self._scheduler, "_schedulers", None)
        if inner is not None and not isinstance(self._scheduler, LRScheduler):
            return list(inner)
        return [self._scheduler] if self._scheduler is not None else []

    def _overridden(self, schedules: list[Any]) -> bool:
        """Was a state loaded into the schedule since? Then what it declares is not what this
        program configured.

        Of one that nobody handed over the bases were never seen: they must be among what the groups
        declared.
        """
        for key, bases in self._schedule_bases(schedules).items():
            seen = self._bases.get(key)
            if seen is not None and seen != bases:
                return True
            if seen is None and any(
                base > known * (1 + 1e-9) for base, known in zip(bases, self._known, strict=False)
            ):
                return True
        return False

    def _schedule_bases(self, schedules: list[Any]) -> dict[int, tuple[float, ...]]:
        every = [one for scheduler in schedules for one in members(scheduler)]
        return {id(one): _per_group(getattr(one, "base_lrs", None)) for one in every}


def _stated(optimizer: Optimizer) -> tuple[float, ...]:
    """What the groups themselves say, and what the optimizer was built with."""
    built_with = _number(optimizer.defaults.get("lr")) or 0.0
    return tuple(
        max([built_with, *(_number(group.get(key)) or 0.0 for key in GROUP_KEYS)])
        for group in optimizer.param_groups
    )


def _peaks(optimizer: Optimizer, schedules: list[Any]) -> tuple[float, ...]:
    """Bases and peaks that schedulers hold as plain numbers."""
    every = [one for scheduler in schedules for one in members(scheduler)]
    count = len(optimizer.param_groups)
    return _highest(
        [_per_group(getattr(one, key, None), count) for one in every for key in SCHEDULE_KEYS]
    )


def _linear_end(scheduler: Any) -> tuple[float, ...]:
    """LinearLR and ConstantLR may end above their base."""
    factors = [
        _number(getattr(scheduler, key, None)) for key in ("start_factor", "end_factor", "factor")
    ]
    top = max((factor for factor in factors if factor is not None), default=0.0)
    return tuple(base * top for base in _per_group(getattr(scheduler, "base_lrs", None)))


def _future(optimizer: Optimizer, scheduler: Any) -> tuple[float, ...]:
    """The highest rates of the next steps, on a copy with an optimizer that stands in for the real
    one.
    """
    if scheduler is None or wants_a_value(scheduler):
        return ()
    stand_in = SimpleNamespace(
        param_groups=[
            {k: _copied(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ],
        step=_nothing,
        state={},
        defaults=dict(optimizer.defaults),
        _opt_called=True,
    )
    highest: tuple[float, ...] = ()
    try:
        ahead = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(_length(scheduler)):
                ahead.step()
                rates = tuple(_number(group.get("lr")) or 0.0 for group in stand_in.param_groups)
                highest = _highest([highest, rates])
    except Exception:  # OneCycleLR ends with one, and a schedule of the user's own may raise any
        return highest
    return highest


def _length(scheduler: Any) -> int:
    lengths = [
        _number(getattr(scheduler, key, None)) for key in ("total_steps", "T_max", "total_iters")
    ]
    return min(
        FORESEEN, int(max((length for length in lengths if length is not None), default=FORESEEN))
    )


def _schedules_of(optimizer: Optimizer) -> list[Any]:
    """Schedulers of a watched loop that nobody handed over. Asked only where a rate is suspicious."""
    if not hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        return []
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    ours = [one for one in found if vars(one).get("optimizer") is optimizer]
    nested = {id(inner) for one in ours for inner in members(one)[1:]}
    return [one for one in ours if id(one) not in nested]


def _nothing() -> None:
    return None


_nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else torch warns of an optimizer it cannot track


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _per_group(values: Any, count: int | None = None) -> tuple[float, ...]:
    """A list of rates, one a group; a single number stands for all of them."""
    if isinstance(values, list | tuple):
        return tuple(_number(value) or 0.0 for value in values)
    rate = _number(values)
    return tuple(rate for _ in range(count or 1)) if rate is not None else ()


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _highest(found: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Of each group the highest finite rate."""
    lists = [rates for rates in found if rates]
    length = max(map(len, lists), default=0)
    return tuple(
        max(
            (rates[g] for rates in lists if g < len(rates) and math.isfinite(rates[g])), default=0.0
        )
        for g in range(length)
    )
