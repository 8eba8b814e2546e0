"""`stepguard.watch` is `Guard` for a loop that makes its own steps."""

from __future__ import annotations

import inspect

import torch

import stepguard
from scenes import plain_net, quiet


def test_watch_takes_the_arguments_of_guard_by_name() -> None:
    guard = inspect.signature(stepguard.Guard.__init__).parameters
    watched = inspect.signature(stepguard.watch).parameters
    assert list(guard)[1:] == list(watched)
    assert all(p.kind is not p.VAR_KEYWORD for p in watched.values())


def test_the_loop_keeps_its_schedule_and_is_clipped_only_where_that_is_asked_for() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with stepguard.watch(model, optimizer, scheduler=schedule, config=quiet()) as guard:
        assert not guard._context.declared.advances
        hooks = len(optimizer._optimizer_step_pre_hooks)
    with stepguard.watch(model, optimizer, config=quiet(clip_norm=1.0)):
        assert len(optimizer._optimizer_step_pre_hooks) == hooks + 1
