"""When a silent failure is told that no look can see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stepguard
from stepguard import GuardConfig
from stepguard.diagnose.rules.sg912 import IN_A_ROW
from stepguard.journal import read_run

Schedule = torch.optim.lr_scheduler.LRScheduler


def told(folder: Path, loop: Callable[[Schedule, int], None], steps: int = IN_A_ROW) -> list[str]:
    """Codes that a watched run with a schedule was told; `loop` is called after every update."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    config = GuardConfig(run_dir=folder, look_every=None, terminal="quiet")
    with stepguard.watch(model, optimizer, scheduler=schedule, config=config):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            loop(schedule, step)
    notes = read_run(folder).notes
    return [str(note["code"]) for note in notes if note.get("kind") == "silent"]


def test_schedule_that_is_never_stepped_is_told_at_the_end(tmp_path: Path) -> None:
    assert told(tmp_path, lambda schedule, step: None) == ["SG912"]


def test_schedule_stepped_once_an_epoch_is_not_told(tmp_path: Path) -> None:
    def once(schedule: Schedule, step: int) -> None:
        if step == IN_A_ROW - 1:
            schedule.step()

    assert told(tmp_path, once) == []


def test_short_run_is_not_told(tmp_path: Path) -> None:
    assert told(tmp_path, lambda schedule, step: None, steps=IN_A_ROW - 1) == []


def test_run_that_an_exception_ends_is_not_told(tmp_path: Path) -> None:
    def interrupt(schedule: Schedule, step: int) -> None:
        if step == IN_A_ROW:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told(tmp_path, interrupt, steps=IN_A_ROW + 2)
    assert [n for n in read_run(tmp_path).notes if n.get("kind") == "silent"] == []
