"""A small guarded project whose bad step is kept, for the tests of capsules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from settings_of import config_of
from stepguard import Guard, Incident

Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.calls += 1
        self.late = x.detach().mean(0)
        return self.outer(F.relu(self.norm(self.inner(x)) + torch.log(shift)[:, None]))


def build(seed: int = 0) -> Built:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, lambda b: F.cross_entropy(model(b["x"], b["shift"]), b["y"])


def healthy(shift: float = 1.0) -> dict[str, Tensor]:
    batch = {"x": torch.randn(6, 4), "y": torch.randint(3, (6,)), "shift": torch.ones(6)}
    batch["shift"][4] = shift
    return batch


def guarded(
    run: Path,
    built: Built,
    steps: list[tuple[Any, ...]],
    settings: dict[str, Any] | None = None,
    **given: Any,
) -> Incident:
    """Run the steps; the last incident."""
    model, optimizer, loss_fn = built
    config = config_of(run_dir=run, terminal="quiet", **(settings or {}))
    with Guard(model, optimizer, config=config, **given) as guard:
        for batches in steps:
            guard.step(loss_fn, *batches)
    return guard.incidents[-1]


def capsule_of(run: Path, incident: Incident) -> Path:
    assert incident.capsule is not None
    return run / incident.capsule
