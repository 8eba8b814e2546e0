"""The task changes in mid-run: the loss jumps for a good reason, and the level before it does not
come back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.healthy.data import (
    CLASSES,
    FEATURES,
    ROWS,
    Clouds,
    classified,
    mlp,
    regression,
    squared,
)
from zoo.healthy.training import Learner, Training, Way, family, register, single

GROUP = "continual"
CHANGE = 150


def _adam(model: torch.nn.Module, loss: Any, lr: float = 1e-2) -> Learner:
    return Learner(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr), loss=loss)


@family(GROUP, "step")
def new_task(seed: int) -> Training:
    """Other clouds every 100 steps."""
    model, tasks = mlp(), [Clouds(seed + 100 * number) for number in range(20)]
    return single(_adam(model, classified(model)), lambda step: tasks[step // 100 % 20].batch())


@family(GROUP, "step")
def permuted_labels(seed: int) -> Training:
    """The same points, every class called otherwise."""
    model, clouds = mlp(), Clouds(seed)
    other = torch.randperm(CLASSES, generator=clouds.generator)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = clouds.batch()
        return x, other[y] if step >= CHANGE else y

    return single(_adam(model, classified(model)), batch)


def changed_targets(change: Callable[[Tensor], Tensor], seed: int) -> Training:
    model, drawn = mlp(outputs=1), regression(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return x, change(y) if step >= CHANGE else y

    return single(_adam(model, squared(model)), batch)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Way]] = {
    "sign_flipped_regression": (torch.neg, "step"),
    "targets_shifted": (lambda y: y + 20.0, "step"),
    "targets_a_thousand_times": (lambda y: y * 1000.0, "watch"),
}
for name, (change, way) in CHANGES.items():
    register(name, GROUP, way, partial(changed_targets, change))


@family(GROUP, "step", "watch")
def sorted_by_class(seed: int) -> Training:
    """Thirty steps of one class, then thirty of the next: each change looks like a divergence."""
    model, clouds = mlp(), Clouds(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return clouds.batch(classes=torch.full((ROWS,), step // 30 % CLASSES))

    return single(_adam(model, classified(model)), batch)


@family(GROUP, "step")
def curriculum(seed: int) -> Training:
    """The noise, and with it the loss, grows from nothing: a slow rise over the whole run."""
    model, clouds = mlp(), Clouds(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        clouds.noise = 0.1 + step / 60
        return clouds.batch()

    return single(_adam(model, classified(model)), batch)


@family(GROUP, "watch")
def curriculum_by_stages(seed: int) -> Training:
    """Longer sums at every stage."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp(outputs=1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, FEATURES, generator=generator)
        x[:, 2 * (1 + step // 60) :] = 0
        return x, x.sum(-1, keepdim=True) ** 2

    return single(_adam(model, squared(model)), batch)


@family(GROUP, "step")
def label_noise_flips(seed: int) -> Training:
    """A fifth of the labels is wrong, and from half-way on two fifths are."""
    model, clouds = mlp(), Clouds(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = clouds.batch()
        wrong = torch.rand(ROWS, generator=clouds.generator) < (0.2 if step < CHANGE else 0.4)
        return x, torch.where(wrong, torch.randint(CLASSES, (ROWS,), generator=clouds.generator), y)

    return single(_adam(model, classified(model)), batch)


@family(GROUP, "watch")
def batch_size_switches(seed: int) -> Training:
    """Batches of 128 rows, then of 2, and back: the spread of the loss changes eightfold."""
    model, clouds = mlp(), Clouds(seed, noise=1.5)
    return single(
        _adam(model, classified(model)), lambda step: clouds.batch(2 if step // 100 % 2 else 128)
    )


@family(GROUP, "step")
def hard_batch_now_and_then(seed: int) -> Training:
    """Every 37th batch is ten times as hard as the others and teaches the same."""
    model, drawn = mlp(outputs=1), regression(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return (3 * x, 3 * y) if step % 37 == 36 else (x, y)

    return single(_adam(model, squared(model), lr=3e-3), batch)
