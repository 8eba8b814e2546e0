"""After a vetoed update the schedule waits, unless it counts epochs."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

import stepguard
from engine.watch.test_gradient_veto import DATA, SCHEDULES, _assert_never_came
from pairwise import pairwise
from scenes import (
    LOOPS,
    QUIET,
    Scene,
    plain_net,
    plain_step,
    poisoned,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    ("schedule", "loop", "fused", "held"),
    pairwise(product(SCHEDULES, LOOPS, [False, True], ["float", "tensor"])),
)
def test_schedule_waits_for_a_real_update(schedule: str, loop: str, fused: bool, held: str) -> None:
    rate: Any = 0.05 if held == "float" else torch.tensor(0.05)

    def make() -> Scene:
        model = plain_net()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=copy.deepcopy(rate), fused=fused, foreach=False
        )
        return Scene(model, optimizer, SCHEDULES[schedule](optimizer))

    _assert_never_came(make, loop, 4)


@pytest.mark.parametrize("fused", [False, True])
def test_schedule_that_moves_once_an_epoch_is_not_held(fused: bool) -> None:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scene = Scene(model, optimizer)
    with stepguard.watch(model, optimizer, scheduler=scheduler, config=QUIET):
        for epoch in range(3):
            for index in range(4):
                plain_step(scene, (poisoned(DATA[0]) if index == 3 else DATA[index],))
            scheduler.step()
            assert scheduler.last_epoch == epoch + 1
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
