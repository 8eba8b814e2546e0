"""The schedule advances only when the optimizer really stepped, and goes back after a veto."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard.tensors.names import optimizer_parameter_ids

# --- Kinds of optimizer that need a driver of their own: closures, fused kernels, wrapped ones.


def needs_closure(optimizer: Optimizer) -> bool:
    """Does `step` evaluate the loss from the start, as often as it likes?"""
    if isinstance(optimizer, LBFGS):
        return True
    closure = None
    with contextlib.suppress(TypeError, ValueError):
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not closure.empty:
        return False
    return not evaluates_again(optimizer)


def evaluates_again(optimizer: Optimizer) -> bool:
    """Does `step` use the gradients that are there, then evaluate the loss again (SAM)?"""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


def takes_closure(optimizer: Optimizer) -> bool:
    """Is it unable to step without a closure?"""
    return needs_closure(optimizer) or evaluates_again(optimizer)


def calls_of_step(optimizer: Optimizer) -> int:
    """Count the calls of its `step` that are running, one inside the other."""
    # torch wraps every `step` in this function, so its frames are the calls
    wrapper = Optimizer.profile_hook_step(Optimizer.step).__code__
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        if frame.f_code is wrapper and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count


def inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the one optimizer inside another that updates the same parameters, else None."""
    found = []
    for item in vars(optimizer).values():
        if isinstance(item, Optimizer) and item is not optimizer:
            found.append(item)
    if len(found) != 1:
        return None
    if optimizer_parameter_ids(optimizer) != optimizer_parameter_ids(found[0]):
        return None
    return found[0]


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Is every group fused, so that `found_inf` makes the kernel change nothing?"""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """The flag that a scaler, or this guard, has given a fused optimizer."""
    return getattr(optimizer, "found_inf", None)


# --- The schedule advances only when the optimizer really stepped: a step found bad afterwards
# takes it back.


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


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """The schedulers of this process that drive the optimizer; of chained ones the outermost."""
    # torch wraps `optimizer.step` for its schedulers; without that mark there are none to find
    if not hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        return []
    # type() and not isinstance: proxies answer isinstance with side effects
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    ours = [one for one in found if vars(one).get("optimizer") is optimizer]
    nested: set[int] = set()
    for one in ours:
        # SequentialLR and ChainedScheduler step the ones they hold
        nested.update(map(id, members(one)[1:]))
    return [one for one in ours if id(one) not in nested]


def scheduler_of(optimizer: Optimizer) -> LRScheduler | None:
    """The one scheduler that drives this optimizer, None where there are several."""
    found = schedulers_of(optimizer)
    return found[0] if len(found) == 1 else None


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


# --- Find the learning rates that groups and schedules declare: a warm-up is not a jump of the
# rate.


READ_FIRST = 4
"""First steps at which the groups are read."""
READ_EVERY = 64
"""Steps between two readings of the groups after that."""
FORESEEN = 512
"""Steps of a schedule's future that are computed."""
MOST_SEARCHES = 8
"""How often a suspicious rate makes the guard search the schedules, in one run."""
GROUP_KEYS = ("lr", "initial_lr", "max_lr")
SCHEDULE_KEYS = ("base_lrs", "max_lrs")
FACTOR_KEYS = ("start_factor", "end_factor", "factor")
SAME_RATE = 1e-9


def group_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """The learning rate of each group, 0 for one that lacks it; empty where all of them do."""
    rates: list[float | None] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        rates.append(rate if type(rate) is float else _number(rate))
    if rates == [None] * len(rates):
        return ()
    return tuple(rates) if None not in rates else tuple(rate or 0.0 for rate in rates)  # type: ignore[arg-type]


def declared_rates(optimizer: Optimizer, scheduler: Any = None) -> tuple[float, ...]:
    """The highest rate declared for each group: by the group, its schedule, or its future."""
    found = [_stated(optimizer)]
    for member in members(scheduler):
        if member is not None:
            found += _bases_and_peaks(optimizer, member)
            # LinearLR and ConstantLR may end above their base
            top = 0.0
            for key in FACTOR_KEYS:
                top = max(top, _number(getattr(member, key, None)) or 0.0)
            found.append(
                tuple(base * top for base in _per_group(getattr(member, "base_lrs", None)))
            )
    found.append(_future(optimizer, scheduler))
    return _highest(found)


class DeclaredRates:
    """What is declared for one optimizer, remembered from when nothing was suspicious."""

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.advances = True
        """False where the loop makes its own steps, and advances its schedule itself."""
        self.told_waiting = False
        found = [_stated(optimizer)]
        for member in _all_members(self._schedules()):
            found += _bases_and_peaks(optimizer, member)
        self._known = _highest(found)
        self._bases = _bases_by_id(self._schedules())
        self._searches = 0

    def known(self, rates: tuple[float, ...], step: int, *, suspicious: bool) -> tuple[float, ...]:
        """The highest declared rate of each group, read again where due; empty where it is not."""
        if suspicious:
            # A rate is far above everything known: has a schedule declared it all along?
            if self._searches >= MOST_SEARCHES:
                return self._known
            self._searches += 1
            schedules = self._schedules() or schedulers_of(self._optimizer)
            if not schedules or self._overridden(schedules):
                return self._known
            found = [self._known]
            for scheduler in schedules:
                set_now = _per_group(getattr(scheduler, "_last_lr", None), len(rates))
                if _equal(set_now, rates):
                    found += [set_now, declared_rates(self._optimizer, scheduler)]
            self._known = _highest(found)
            return self._known
        if step < READ_FIRST or step % READ_EVERY == 0:
            self._known = _highest([self._known, _stated(self._optimizer)])
            return self._known
        return ()

    def position(self, rates: tuple[float, ...]) -> str:
        """Name and position of the schedule of a watched loop, looked for among all objects; the
        name alone where it has moved on since the step had these rates.
        """
        for scheduler in schedulers_of(self._optimizer):
            if _equal(_per_group(getattr(scheduler, "_last_lr", None), len(rates)), rates):
                return named_position(scheduler)
            return type(scheduler).__name__
        return ""

    def _schedules(self) -> list[Any]:
        if self._scheduler is None:
            return []
        inner = getattr(self._scheduler, "_schedulers", None)
        if inner is not None and not isinstance(self._scheduler, LRScheduler):
            return list(inner)
        return [self._scheduler]

    def _overridden(self, schedules: list[Any]) -> bool:
        """Was a state loaded into a schedule since? Then this program did not configure it.

        The bases of a schedule that the guard was not given were never seen: they must be among
        what the groups declared.
        """
        for key, bases in _bases_by_id(schedules).items():
            seen = self._bases.get(key)
            if seen is None and _any_above(bases, self._known):
                return True
            if seen is not None and seen != bases:
                return True
        return False


def _all_members(schedules: list[Any]) -> list[Any]:
    every: list[Any] = []
    for scheduler in schedules:
        every += members(scheduler)
    return every


def _bases_by_id(schedules: list[Any]) -> dict[int, tuple[float, ...]]:
    every = _all_members(schedules)
    return {id(member): _per_group(getattr(member, "base_lrs", None)) for member in every}


def _stated(optimizer: Optimizer) -> tuple[float, ...]:
    """What the groups themselves say, and what the optimizer was built with."""
    built_with = _number(optimizer.defaults.get("lr")) or 0.0
    stated: list[float] = []
    for group in optimizer.param_groups:
        rates = [_number(group.get(key)) or 0.0 for key in GROUP_KEYS]
        stated.append(max(built_with, *rates))
    return tuple(stated)


def _bases_and_peaks(optimizer: Optimizer, scheduler: Any) -> list[tuple[float, ...]]:
    """What a scheduler holds as plain numbers."""
    count = len(optimizer.param_groups)
    return [_per_group(getattr(scheduler, key, None), count) for key in SCHEDULE_KEYS]


def _future(optimizer: Optimizer, scheduler: Any) -> tuple[float, ...]:
    """The highest rates of the next steps, computed on a copy with a stand-in for the optimizer."""
    if scheduler is None or wants_a_value(scheduler):
        return ()
    stand_in = _stand_in(optimizer)
    highest: tuple[float, ...] = ()
    try:
        # the stand-in as the copy of the optimizer: else the parameters would be copied as well
        ahead = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lengths = [_number(getattr(scheduler, key, None)) for key in LENGTH_KEYS]
            known = [length for length in lengths if length is not None]
            for _ in range(min(FORESEEN, int(max(known, default=FORESEEN)))):
                ahead.step()
                rates = tuple(_number(group.get("lr")) or 0.0 for group in stand_in.param_groups)
                highest = _highest([highest, rates])
    except Exception:
        # OneCycleLR raises at its end, and a schedule of the user's own may raise anything
        return highest
    return highest


def _stand_in(optimizer: Optimizer) -> SimpleNamespace:
    """Everything of an optimizer that schedulers use, without its parameters."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.append({key: _copied(value) for key, value in group.items() if key != "params"})
    return SimpleNamespace(
        param_groups=groups,
        step=_nothing,
        state={},
        defaults=dict(optimizer.defaults),
        _opt_called=True,
    )


def _nothing() -> None:
    return None


# without this mark torch warns of an optimizer that it cannot track
_nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def _per_group(values: Any, count: int = 1) -> tuple[float, ...]:
    """A list of rates, one a group; a single number stands for all of them."""
    if isinstance(values, list | tuple):
        return tuple(_number(value) or 0.0 for value in values)
    rate = _number(values)
    if rate is None:
        return ()
    return (rate,) * count


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _equal(some: tuple[float, ...], others: tuple[float, ...]) -> bool:
    pairs = zip(some, others, strict=False)
    return all(math.isclose(one, other, rel_tol=SAME_RATE) for one, other in pairs)


def _any_above(rates: tuple[float, ...], limits: tuple[float, ...]) -> bool:
    pairs = zip(rates, limits, strict=False)
    return any(rate > limit * (1 + SAME_RATE) for rate, limit in pairs)


def _highest(found: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """The highest finite learning rate of each group."""
    highest: list[float] = []
    for rates in found:
        highest += [0.0] * (len(rates) - len(highest))
        for group, rate in enumerate(rates):
            if math.isfinite(rate):
                highest[group] = max(highest[group], rate)
    return tuple(highest)
