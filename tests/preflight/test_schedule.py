"""A dry run of the schedule on a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stepguard.check import inspection, items_step
from stepguard.check.inspection import dry_run, follows_metric, peak_rates
from stepguard.check.preflight import Subject, check


def adam(lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=lr)


def test_peak_and_end_are_found_and_the_real_schedule_is_not_moved() -> None:
    optimizer = adam()
    one_cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100, pct_start=0.3)
    before = one_cycle.state_dict() | {"rate": optimizer.param_groups[0]["lr"]}
    rates, fault = dry_run(optimizer, one_cycle, 99)
    assert (len(rates), fault) == (100, "")
    assert max(rates) == pytest.approx(1e-2)
    assert rates.index(max(rates)) == 29
    assert rates[0] == pytest.approx(4e-4) and rates[-1] < 1e-6
    assert one_cycle.state_dict() | {"rate": optimizer.param_groups[0]["lr"]} == before


def test_schedule_that_is_too_short_says_where_it_fails() -> None:
    optimizer = adam()
    rates, fault = dry_run(optimizer, lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10), 20)
    assert len(rates) == 11 and fault.startswith("ValueError: Tried to step")


def test_long_run_is_not_tried_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MOST_STEPS", 5)
    monkeypatch.setattr(items_step, "MOST_STEPS", 5)
    optimizer = adam()
    for steps in (6, None):
        subject = Subject(
            optimizer=optimizer, scheduler=lr_scheduler.ConstantLR(optimizer), steps=steps
        )
        (said,) = check(subject, only=["lr.schedule"]).outcome("lr.schedule").evidence
        assert said.endswith("5 steps tried (the length of the run is not configured)")


def test_rate_that_is_meant_is_the_peak_of_one_cycle_else_the_base() -> None:
    optimizer = adam()
    assert peak_rates(optimizer) == [1e-3]
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert peak_rates(optimizer) == [1e-3]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    assert peak_rates(optimizer) == [1e-2]


def test_schedule_of_a_metric_is_told_by_its_signature() -> None:
    assert follows_metric(lr_scheduler.ReduceLROnPlateau(adam()))
    assert not follows_metric(lr_scheduler.ConstantLR(adam()))
    assert not follows_metric(None)
