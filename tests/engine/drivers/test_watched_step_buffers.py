"""Buffers that change in every forward pass of a watched model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scenes import (
    CLASSES,
    FEATURES,
    Scene,
    batches,
    grouped,
    poisoned,
    watched,
)
from stepguard.journal import read_run

DATA = batches(12)


def _sgd(model: nn.Module, lr: float = 0.05) -> Scene:
    return Scene(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def _fused(model: nn.Module) -> Scene:
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def _losses(folder: Path) -> list[Any]:
    return [line.get("loss") for line in read_run(folder).steps]


class Counting(nn.Module):
    """A buffer that is no norm statistic and still changes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.out(inputs)


@pytest.mark.parametrize("make", [_sgd, _fused])
def test_counter_in_a_buffer_loses_the_bad_step_and_no_other(
    make: Callable[[nn.Module], Scene],
) -> None:
    scene = make(Counting())
    watched(scene, grouped([DATA[0], DATA[1], poisoned(DATA[2]), DATA[3], DATA[4]], 1))
    assert scene.model.seen == 4


def test_buffer_that_first_changes_after_a_late_veto_keeps_its_change() -> None:
    scene = _fused(Counting())
    model = scene.model
    scene.loss = lambda s, b: nn.functional.cross_entropy(
        (s.model if b is DATA[3] else s.model.out)(b[0]), b[1]
    )
    watched(scene, grouped([DATA[0], poisoned(DATA[2]), DATA[3], DATA[4]], 1))
    assert model.seen == 1
