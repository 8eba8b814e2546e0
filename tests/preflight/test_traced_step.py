"""A check leaves the user's objects bit for bit as they were."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from preflight.asking import CONFIG, inside
from stepguard.check.preflight import Subject, Tracked, check
from stepguard.check.settings import unread


class Stateful(nn.Module):
    """Moves a buffer, a counter, a weight and every generator in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        random.random()
        np.random.rand()
        return self.linear(nn.functional.dropout(self.norm(x.add_(1.0))))


def test_model_optimizer_batch_loader_and_generators_stay(tmp_path: Any) -> None:
    model = Stateful()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.linear.bias.grad = torch.full((3,), 7.0)
    grad = model.linear.bias.grad
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=50)
    generator = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(4), "y": torch.tensor(index % 3)} for index in range(8)]
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    loss = nn.CrossEntropyLoss()
    subject = Subject(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        loss_fn=lambda batch: loss(model(batch["x"]), batch["y"]),
        run_dir=tmp_path,
    )
    before = _everything(subject, generator, data)
    with inside(tmp_path):
        result = check(subject)
    assert result.outcome("model.fresh_forward").status == "pass", result.outcome(
        "model.fresh_forward"
    )
    after = _everything(subject, generator, data)
    assert _equal(before, after)
    assert model.linear.bias.grad is grad
    assert model.calls == 0


def _everything(subject: Subject, generator: torch.Generator, data: Any) -> Any:
    assert subject.model is not None and subject.optimizer is not None
    return copy.deepcopy(
        (
            subject.model.state_dict(),
            subject.optimizer.state_dict(),
            subject.scheduler.state_dict(),
            generator.get_state(),
            torch.get_rng_state(),
            random.getstate(),
            list(np.random.get_state()[1]),
            data,
        )
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def test_reading_the_configuration_counts_no_read(tmp_path: Path) -> None:
    tracked = Tracked(CONFIG)
    with inside(tmp_path):
        check(Subject(config=tracked), only=["lr", "config", "precision", "checklist"])
    assert len(unread(tracked)) == 11
