"""Learning rates are judged against what groups and schedules declare: a warm-up is no jump, and a
jump is told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import stepguard
from scenes import Batch, batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.drivers import schedule as module
from stepguard.engine.drivers.schedule import declared_rates

DATA = batches(30)
LOOPS = ["step", "watch", "watch, not handed over"]


def _sgd(lr: float = 1e-2) -> tuple[nn.Module, Optimizer]:
    model = plain_net()
    return model, torch.optim.SGD(model.parameters(), lr)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _notes(
    model: nn.Module, optimizer: Optimizer, how: str, scheduler: Any, before: Any = None
) -> list[str]:
    """What is said about learning rates; `before` is called before each step with its index."""
    said: list[str] = []
    handed = {} if "not handed" in how else {"scheduler": scheduler}
    with (Guard if how == "step" else stepguard.watch)(
        model, optimizer, config=quiet(), **handed
    ) as guard:
        guard._context.outputs.note = lambda kind, text, **facts: said.append(text)  # type: ignore[method-assign]
        for index, batch in enumerate(DATA):
            if before is not None:
                before(index)
            if how == "step":
                guard.step(lambda b: _loss(model, b), batch)
                continue
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        assert guard.armed and guard.incidents == ()
    return [line for line in said if "runs with lr" in line]


def _noam(step: int) -> float:
    return 1e-3 * min((step + 1) ** -0.5, (step + 1) * 8**-1.5) * 1000


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=60),
    "linear warm-up": lambda o: lr_scheduler.LinearLR(o, 1e-4, total_iters=5),
    "linear above its base": lambda o: lr_scheduler.LinearLR(o, 0.01, 1.0, total_iters=3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-5, 1e-2, step_size_up=4),
    "noam by lambda": lambda o: lr_scheduler.LambdaLR(o, _noam),
    "lambda above 1": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.001 * 10.0 ** min(step, 4)),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=1e-6),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 1e-3, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 20)],
        [4],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 1e-3, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(
        o, lambda step: 3.0 if step < 4 else 1.0
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_that_climbs_as_it_declares_is_not_a_jump(name: str, how: str) -> None:
    model, optimizer = _sgd(1e-3 if name == "multiplicative" else 1e-2)
    assert _notes(model, optimizer, how, SCHEDULES[name](optimizer)) == []


@pytest.mark.parametrize("how", ["step", "watch"])
def test_warm_up_by_epoch_that_declares_its_rate_in_the_group_is_not_a_jump(how: str) -> None:
    model, optimizer = _sgd(0.1)
    for group in optimizer.param_groups:  # what timm's Scheduler does
        group["initial_lr"], group["lr"] = group["lr"], 1e-6

    def warm(index: int) -> None:
        if index == 10:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"]

    assert _notes(model, optimizer, how, None, warm) == []


def test_warm_up_by_hand_up_to_the_rate_the_optimizer_was_built_with_is_not_a_jump() -> None:
    model, optimizer = _sgd(0.1)
    optimizer.param_groups[0]["lr"] = 1e-6

    def warm(index: int) -> None:
        optimizer.param_groups[0]["lr"] = min(0.1, 1e-6 * 10.0**index)

    assert _notes(model, optimizer, "watch", None, warm) == []


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_rate_put_into_the_group_by_hand_is_told(how: str, scheduled: bool) -> None:
    model, optimizer = _sgd(1e-4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100) if scheduled else None

    def jump(index: int) -> None:
        if index == 12:
            optimizer.param_groups[0]["lr"] *= 100

    (told,) = _notes(model, optimizer, how, scheduler, jump)
    assert "the highest configured or seen before is 0.0001" in told


@pytest.mark.parametrize("how", LOOPS)
def test_schedule_state_loaded_over_the_configured_rate_is_told(how: str) -> None:
    model, optimizer = _sgd(1e-4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    _, old = _sgd(1e-2)
    saved = (
        copy.deepcopy(lr_scheduler.CosineAnnealingLR(old, 100).state_dict()),
        copy.deepcopy(old.state_dict()),
    )

    def resume(index: int) -> None:
        if index == 12:
            scheduler.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    assert _notes(model, optimizer, how, scheduler, resume) != []


def test_declared_rates_of_each_group_come_from_wherever_they_are_declared() -> None:
    model = plain_net()
    groups = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": model[2].parameters(), "lr": 1e-2},
    ]
    optimizer = torch.optim.SGD(groups, 1e-5)
    assert declared_rates(optimizer) == (1e-3, 1e-2)
    cycle = lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=50)
    assert declared_rates(optimizer, cycle) == pytest.approx((0.1, 0.2))


def test_looking_ahead_leaves_scheduler_and_optimizer_untouched() -> None:
    _, optimizer = _sgd()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    before = copy.deepcopy((scheduler.state_dict(), optimizer.state_dict()))
    assert max(declared_rates(optimizer, scheduler)) > 1e-2 * 500
    assert (scheduler.state_dict(), optimizer.state_dict()) == before


def test_schedule_that_raises_is_not_a_fault_of_the_run() -> None:
    def explodes(step: int) -> float:
        if step > 3:
            raise RuntimeError("no such step")
        return 1.0

    _, optimizer = _sgd()
    assert declared_rates(optimizer, lr_scheduler.LambdaLR(optimizer, explodes)) == (1e-2,)


def test_healthy_run_never_looks_into_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: Any) -> Any:
        raise AssertionError("a healthy step asked for the schedule's future")

    monkeypatch.setattr(module, "_future", looked)
    monkeypatch.setattr(module, "schedulers_of", looked)
    model, optimizer = _sgd()
    assert _notes(model, optimizer, "step", lr_scheduler.CosineAnnealingLR(optimizer, 30)) == []
