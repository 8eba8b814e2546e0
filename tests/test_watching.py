"""`stepguard.watch` is `Guard` for a loop with steps of its own; frameworks use `guard.port`."""

from __future__ import annotations

import inspect

import pytest
import torch

import stepguard
from scenes import NAN, QUIET, batches, plain_net, quiet
from stepguard import ConfigError, Guard


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


MOVED = ("micro", "dropped", "start_at", "settle", "finite", "trouble", "good", "say")


@pytest.mark.parametrize("name", MOVED)
def test_members_for_frameworks_are_on_the_port(name: str) -> None:
    model = plain_net()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET) as guard:
        assert not hasattr(guard, name)
        assert hasattr(guard.port, name)


def test_micro_is_for_watched_loops_only() -> None:
    model = plain_net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    with guard, pytest.raises(ConfigError, match=r"stepguard\.watch"):
        guard.port.micro(lambda batch: batch, batches(1)[0])


def test_trouble_names_what_must_not_be_saved() -> None:
    model = plain_net()
    guard = stepguard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    assert guard.port.finite() and guard.port.trouble() == () and guard.port.good
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
    assert not guard.port.finite()
    assert guard.port.trouble() == ("param:0.weight",)
    with torch.no_grad():
        model[0].weight.zero_()
    guard.close()
