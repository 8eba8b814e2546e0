"""`watch`: protect a loop that runs its own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from stepguard.engine.drivers.watch import WatchDriver
from stepguard.engine.watch.observed_loss import clip_before_update
from stepguard.engine.wiring import building_for, check_watched
from stepguard.guard import Guard
from stepguard.records import GuardConfig


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    scaler: GradScaler | None = None,
    modules: dict[str, nn.Module] | None = None,
    loader: Any = None,
    state: dict[str, Any] | None = None,
    config: GuardConfig | None = None,
) -> Guard:
    """Guard an unchanged training loop: the guard reads and vetoes inside `optimizer.step()`.

    A vetoed update does not advance `scheduler` and `scaler`. `modules` are further modules by
    name, such as a criterion; `loader` becomes `guard.loader`, whose position is saved; `state`
    holds further objects of the run that have `state_dict` and `load_state_dict`.

        guard = stepguard.watch(model, optimizer, scheduler=scheduler)
        for batch in loader:
            optimizer.zero_grad()
            loss = guard.loss(loss_fn, batch)   # or loss_fn(batch), as before
            loss.backward()
            optimizer.step()
            scheduler.step()
    """
    check_watched(config, optimizer)
    given = config
    clipping: RemovableHandle | None = None
    if isinstance(config, GuardConfig) and config.clip_norm is not None:
        # before the guard's own hooks, so that it reads what the update gets
        clipping = clip_before_update(model, optimizer, scaler, config.clip_norm)
        config = replace(config, clip_norm=None)
    try:
        guard = Guard(
            model,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            modules=modules,
            loader=loader,
            state=state,
            config=config,
        )
    except BaseException:
        if clipping is not None:
            clipping.remove()
        raise
    if clipping is None:
        return _watched(guard)
    context = guard._context
    hooks = [clipping]
    limit = cast(GuardConfig, given).clip_norm
    assert limit is not None

    def clip_for(adopted: Optimizer) -> None:
        hooks.append(clip_before_update(model, adopted, context.scaler, limit))
        hooks.pop(0).remove()

    context.hooks.adopted.append(clip_for)
    context.resources.callback(lambda: hooks[0].remove())
    return _watched(guard)


def watch_for(framework: str, model: nn.Module, optimizer: Optimizer, **settings: Any) -> Guard:
    """For integrations: the guard is the framework's, and `clip_norm` tells its own clipping."""
    token = building_for.set(framework)
    try:
        return _watched(Guard(model, optimizer, **settings))
    finally:
        building_for.reset(token)


def _watched(guard: Guard) -> Guard:
    """Give the guard the driver of a loop that makes its own steps."""
    guard._context.declared.advances = False
    guard._wiring.expect_own_steps()
    guard._driver = WatchDriver(guard._context, guard._protect, guard._rewinder, guard._wiring)
    guard.port.driver = guard._driver
    return guard
