"""Learning rates that were not configured, or are not numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.test_transaction_verdicts import DATA, _notes
from guard.judging import incidents, kinds, sgd
from scenes import (
    INF,
    LOOPS,
    NAN,
    Scene,
    difference,
    plain_net,
    quiet,
    state_of,
)
from stepguard import Guard, GuardConfig


@pytest.mark.parametrize("loop", LOOPS)
def test_learning_rate_nobody_configured_is_noted(loop: str, tmp_path: Path) -> None:
    scene = sgd(plain_net())

    def raises_the_rate(scene: Scene, batch: Any) -> Tensor:
        scene.optimizer.param_groups[0]["lr"] = 1.0
        return nn.functional.cross_entropy(scene.model(batch[0]), batch[1])

    scene.loss = raises_the_rate
    assert incidents(scene, loop, [(DATA[0],)], quiet(run_dir=tmp_path)) == []
    assert _notes(tmp_path) == [(0, "lr_mismatch")]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("rate", [NAN, INF])
def test_learning_rate_that_is_no_number_never_reaches_the_weights(loop: str, rate: float) -> None:
    scene = sgd(plain_net())
    before = state_of(scene)["model"]
    scene.optimizer.param_groups[0]["lr"] = rate
    assert kinds(incidents(scene, loop, [(DATA[0],)])) == [(0, "lr_mismatch")]
    assert difference(state_of(scene)["model"], before) == ""


@pytest.mark.parametrize("times", [1e5, 1e7])
def test_learning_rate_jump_is_the_cause_however_far_the_exponential_overflows(
    times: float,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(0)
    with Guard(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for step in range(44):
            optimizer.param_groups[0]["lr"] = 0.01 * (times if step >= 40 else 1.0)
            guard.step(
                lambda x: (torch.exp(model(x)) - 2.0).pow(2).mean(),
                torch.rand(16, 4, generator=draw),
            )
    first = guard.incidents[0]
    assert first.origin is not None and first.origin.op == "aten.exp"
    assert first.findings[0].code == "SG504"
