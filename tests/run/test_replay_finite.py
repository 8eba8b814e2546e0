"""The replay of a finite incident compares losses: there is no bad value to find again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from settings_of import config_of
from stepguard import Guard
from stepguard.records import Incident
from stepguard.report.phrases import next_commands
from stepguard.run.replay import replay

BATCH = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
LossFn = Callable[[Tensor], Tensor]


def build(slope: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer, LossFn]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_fn(batch: Tensor) -> Tensor:
        return slope * (model(batch) - 1.0).pow(2).mean()

    return model, optimizer, loss_fn


@pytest.fixture(scope="module")
def spike(tmp_path_factory: pytest.TempPathFactory) -> Incident:
    """Weights that jump between two steps: the loss is far too high, and finite."""
    folder = tmp_path_factory.mktemp("spike")
    model, optimizer, loss_fn = build()
    settings: dict[str, Any] = {"terminal": "quiet", "anomalies": "act", "capsule": "full"}
    guard = Guard(model, optimizer, config=config_of(run_dir=folder, **settings))
    incident = None
    for step in range(80):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        if step == 60:
            with torch.no_grad():
                next(model.parameters()).mul_(1e4)
        incident = incident or guard.step(loss_fn, BATCH + 0.01 * noise).incident
    guard.close()
    assert incident is not None and incident.verdict.finite_anomaly
    assert incident.capsule is not None
    return incident


def test_same_loss_is_reproduced(spike: Incident) -> None:
    again = replay(Path(str(spike.run)) / str(spike.capsule), build=build)
    assert again.origin is not None and again.origin.reproduced
    assert "the same to the last bit" in again.origin.remarks[0]


def test_other_loss_is_said_with_both_numbers(spike: Incident) -> None:
    again = replay(Path(str(spike.run)) / str(spike.capsule), build=lambda: build(2.0))
    assert again.origin is not None and again.origin.reproduced is False
    departs = again.origin.evidence.departs
    assert departs is not None and "in training it was" in departs


def test_capsule_without_a_program_is_not_offered_for_replay(spike: Incident) -> None:
    # pytest is no script of a project, as a notebook is none
    assert not spike.replayable
    assert not any("replay" in command for command in next_commands(spike))
