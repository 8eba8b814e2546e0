"""Loss functions with a state of their own: called once more than in the bare run, they give
another run.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.healthy.data import Clouds, classified, mlp, regression, squared
from zoo.healthy.training import Learner, Training, family, single

GROUP = "state of the loss"


@family(GROUP, "step")
def own_generator(seed: int) -> Training:
    """The loss draws noise from a generator of its own; one batch in 50 is hard."""
    own = torch.Generator().manual_seed(seed)
    model, drawn = mlp(outputs=1), regression(seed)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x + 0.1 * torch.randn(x.shape, generator=own)), y)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return x, 8 * y if step % 50 == 49 else y

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss
    )
    return single(learner, batch, world=own.get_state)


@family(GROUP, "step")
def own_counter_and_list(seed: int) -> Training:
    """A counter that weighs the loss and a list of what was seen; one batch in 50 is hard."""
    model, drawn = mlp(outputs=1), regression(seed)
    counter, seen = itertools.count(1), []

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        count = next(counter)
        found = F.mse_loss(model(batch[0]), batch[1]) * (1 + 1 / count)
        seen.append(found.detach())
        return found

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return x, 8 * y if step % 50 == 49 else y

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss
    )
    return single(learner, batch, world=lambda: seen)


@family(GROUP, "step")
def every_random_source(seed: int) -> Training:
    """Augmentation from Python's, numpy's and torch's global generators, in the loss and in the
    loop.
    """
    model, clouds = mlp(), Clouds(seed)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        size = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return F.cross_entropy(model(size * x + 0.1 * torch.randn_like(x)), y)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = clouds.batch()
        if random.random() < 0.02:
            x = 10 * x
        return x, y

    return single(
        Learner(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=loss),
        batch,
    )


@family(GROUP, "step")
def batches_changed_in_place(seed: int) -> Training:
    """The loss normalises its batch in place: a second look would see another batch."""
    model, drawn = mlp(outputs=1), regression(seed)
    inner = squared(model)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].sub_(batch[0].mean(0)).div_(batch[0].std(0) + 0.5)
        return inner(batch)

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss
    )
    return single(learner, drawn)


@family(GROUP, "step")
def moving_average_of_losses(seed: int) -> Training:
    """The loss is divided by its own running mean, as in some multi-task recipes."""
    model, clouds = mlp(), Clouds(seed)
    inner, held = classified(model), {"mean": torch.ones(())}

    def loss(batch: Any) -> Tensor:
        found = inner(batch)
        held["mean"] = 0.9 * held["mean"] + 0.1 * found.detach()
        return found / held["mean"]

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=loss
    )
    return single(learner, lambda step: clouds.batch(), world=lambda: held)
