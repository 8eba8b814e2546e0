"""Learning rates that leap as they were told to: warm restarts, cycles, warm-up by epoch, rates set
by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

from zoo.healthy.data import Clouds, classified, mlp, regression, squared
from zoo.healthy.training import Learner, Training, Update, Way, family, register, single

GROUP = "schedules"
Make = Callable[[Optimizer], Any]


def scheduled(make: Make, seed: int) -> Training:
    model, clouds = mlp(), Clouds(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    learner = Learner(
        model=model, optimizer=optimizer, loss=classified(model), scheduler=make(optimizer)
    )
    return single(learner, lambda step: clouds.batch())


SCHEDULES: dict[str, tuple[Make, Way]] = {
    "warm_restarts": (lambda o: schedules.CosineAnnealingWarmRestarts(o, 50, 2), "step"),
    "cyclic": (lambda o: schedules.CyclicLR(o, 1e-4, 0.3, step_size_up=20), "watch"),
    "one_cycle": (
        lambda o: schedules.OneCycleLR(o, 0.3, total_steps=100_000, pct_start=0.001),
        "step",
    ),
    "steps_down_and_up": (
        lambda o: schedules.MultiplicativeLR(o, lambda s: {100: 0.01, 200: 100.0}.get(s, 1.0)),
        "step",
    ),
}
for name, (make, way) in SCHEDULES.items():
    register(name, GROUP, way, partial(scheduled, make))


@family(GROUP, "step", "watch")
def warmup_by_epoch(seed: int) -> Training:
    """As timm does it: 1e-6 for the first epoch, then 0.1, set into the groups by the loop."""
    model, drawn = mlp(outputs=1), regression(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], 1e-6
    learner = Learner(model=model, optimizer=optimizer, loss=squared(model))

    def updates(step: int) -> Iterator[Update]:
        if step == 30:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"]
        yield "only", (drawn(step),)

    return Training(learners={"only": learner}, updates=updates)


@family(GROUP, "watch")
def rate_by_hand(seed: int) -> Training:
    """The loop writes its own rate at every step: a triangle without any declared maximum."""
    model, clouds = mlp(), Clouds(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    learner = Learner(model=model, optimizer=optimizer, loss=classified(model))

    def updates(step: int) -> Iterator[Update]:
        optimizer.param_groups[0]["lr"] = 1e-5 + 0.02 * (1 - abs(step % 100 - 50) / 50)
        yield "only", (clouds.batch(),)

    return Training(learners={"only": learner}, updates=updates)


@family(GROUP, "step")
def edge_of_stability(seed: int) -> Training:
    """Full batches with a rate so large that the loss climbs and falls again, as it does in real
    networks.
    """
    clouds = Clouds(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))
    whole = clouds.batch(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    return single(
        Learner(model=model, optimizer=optimizer, loss=classified(model)), lambda step: whole
    )


@family(GROUP, "watch")
def large_rate_with_clipping(seed: int) -> Training:
    """Adam at 0.05 under a tight clip: noisy, up and down, and learning."""
    model, clouds = mlp(), Clouds(seed)
    learner = Learner(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=classified(model),
        clip=0.1,
    )
    return single(learner, lambda step: clouds.batch(8))
