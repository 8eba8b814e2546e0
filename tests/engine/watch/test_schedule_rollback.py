"""A watched loop moves its schedule after a veto; that is taken back, epochs are left alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from stepguard import GuardConfig
from stepguard.engine.build import build_context
from stepguard.engine.watch.live_tracing import ScheduleRollback


def _scene() -> tuple[ScheduleRollback, StepLR, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    config = GuardConfig(terminal="quiet")
    context = build_context(model, optimizer, scheduler, None, None, None, config)
    context.resources.close()
    optimizer.step()
    return ScheduleRollback(context), scheduler, optimizer


def test_schedule_that_moved_after_a_veto_is_taken_back() -> None:
    rollback, scheduler, optimizer = _scene()
    rollback.take_back(moved=True)
    rollback.vetoed()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    rollback.take_back(rollback.moved())
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert scheduler.last_epoch == 0


def test_schedule_of_epochs_is_left_where_the_loop_put_it() -> None:
    rollback, scheduler, optimizer = _scene()
    rollback.take_back(moved=None)
    rollback.take_back(rollback.moved())  # a committed update after which it stood still
    assert not rollback.every_step
    rollback.vetoed()
    scheduler.step()
    rollback.take_back(rollback.moved())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_nothing_is_learned_from_a_step_the_scaler_skipped() -> None:
    rollback, _, _ = _scene()
    rollback.take_back(moved=None)
    rollback.scaler_skipped()
    rollback.take_back(rollback.moved())
    assert rollback.every_step
