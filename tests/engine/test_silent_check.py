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


# --- healthy trainings that look like a mistake, with default settings ------------------------


def healthy(
    folder: Path, model: nn.Module, step: Callable[[int], None], **given: object
) -> list[str]:
    """Codes that a watched run was told; `step` is one step of the loop."""
    config = GuardConfig(run_dir=folder, terminal="quiet")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with stepguard.watch(model, optimizer, config=config, **given):  # type: ignore[arg-type]
        for number in range(80):
            optimizer.zero_grad()
            step(number)
            optimizer.step()
    record = read_run(folder)
    assert len(record.looks) >= 6
    return [str(note["code"]) for note in record.notes if note.get("kind") == "silent"]


def test_answers_of_one_token_are_not_told(tmp_path: Path) -> None:
    model = nn.Embedding(200, 50)

    def step(number: int) -> None:
        tokens = torch.randint(0, 200, (8, 160))
        labels = torch.full_like(tokens, -100)
        labels[:, -1] = torch.randint(0, 50, (8,))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()

    assert healthy(tmp_path, model, step) == []


def test_all_of_the_data_in_a_batch_of_a_loader_is_not_told(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    model = nn.Linear(4, 1)

    def step(number: int) -> None:
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()

    assert healthy(tmp_path, model, step) == []


def test_average_that_follows_once_an_epoch_is_not_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)

    def step(number: int) -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        if number % 40 == 39:
            ema.update_parameters(model)

    assert healthy(tmp_path, model, step, state={"ema": ema}) == []


def test_average_that_never_follows_is_told_at_the_end(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)

    def step(number: int) -> None:
        model(torch.randn(8, 4)).square().mean().backward()

    assert healthy(tmp_path, model, step, state={"ema": ema}) == ["SG913"]


def test_forgotten_zero_grad_is_told_with_default_settings(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    config = GuardConfig(run_dir=tmp_path, terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(12):
            model(torch.randn(32, 10)).square().mean().backward()
            optimizer.step()
    notes = read_run(tmp_path).notes
    assert [note["code"] for note in notes if note.get("kind") == "silent"] == ["SG902"]
