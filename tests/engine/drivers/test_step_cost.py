"""A healthy step stays cheap: how many functions of ours it calls, whatever the model's size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import stepguard

OURS = str(Path(stepguard.__file__).parent)
SETTLED = 70
"""Steps before those that are counted: by then the window of losses is full."""
MOST = {"step": (120, 29), "watch": (180, 34)}
"""Calls of ours, and the modules they are in, of one healthy step."""


def _loop(drive: str, layers: int, folder: Path) -> tuple[stepguard.Guard, Callable[[], object]]:
    torch.manual_seed(0)
    middle = [nn.Linear(8, 8) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), *middle, nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    config = stepguard.GuardConfig(
        run_dir=folder, terminal="quiet", probes=stepguard.Probes(look_every=None)
    )

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step() -> None:
        optimizer.zero_grad()
        loss((x, y)).backward()
        optimizer.step()

    if drive == "watch":
        return stepguard.watch(model, optimizer, config=config), step
    guard = stepguard.Guard(model, optimizer, config=config)
    return guard, lambda: guard.step(loss, (x, y))


def _calls(step: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions of ours in one step, and the modules they are in."""
    found: list[str] = []

    def event(frame: FrameType, kind: str, argument: Any) -> None:
        if kind == "call" and frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_filename)

    sys.setprofile(event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found), len(set(found))


@pytest.mark.parametrize("drive", MOST)
def test_healthy_step_calls_few_functions_however_many_layers_there_are(
    drive: str, tmp_path: Path
) -> None:
    counted = []
    for layers in (2, 40):
        guard, step = _loop(drive, layers, tmp_path / str(layers))
        with guard:
            for _ in range(SETTLED):
                step()
            # some steps do more now and then: a collected guard of another test ends, say
            counted.append(min(_calls(step) for _ in range(5)))
    (few, modules), (many, _) = counted
    # a few calls depend on where the loss stands, none on the 38 further layers
    assert abs(many - few) < 10
    assert few <= MOST[drive][0]
    assert modules <= MOST[drive][1]
