"""Fine-tuning: the run starts converged, so every loss is as low as it will ever be and the first
updates raise it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zoo.healthy.data import Clouds, classified, mlp, pretrained
from zoo.healthy.training import Learner, Training, Way, family, register, single

GROUP = "fine-tuning"
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw_1e-2": partial(torch.optim.AdamW, lr=1e-2),
    "adamw_3e-3": partial(torch.optim.AdamW, lr=3e-3),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def same_data(make: Make, seed: int) -> Training:
    """Goes on with the data it converged on; the optimizer is a fresh one."""
    model, clouds = pretrained(seed)
    learner = Learner(model=model, optimizer=make(model.parameters()), loss=classified(model))
    return single(learner, lambda step: clouds.batch())


def new_data(make: Make, seed: int) -> Training:
    """Goes on with other clouds: the first losses are far above where pre-training ended."""
    model, _ = pretrained(seed)
    clouds = Clouds(seed + 1)
    learner = Learner(model=model, optimizer=make(model.parameters()), loss=classified(model))
    return single(learner, lambda step: clouds.batch())


WAYS: dict[str, tuple[Way, ...]] = {
    "adamw_1e-2": ("step", "watch"),
    "adamw_3e-3": ("step",),
    "sgd_momentum": ("watch",),
}
for name, make in OPTIMIZERS.items():
    for way in WAYS[name]:
        register(f"finetune_{name}", GROUP, way, partial(same_data, make))
register("finetune_new_data_adamw", GROUP, "step", partial(new_data, OPTIMIZERS["adamw_1e-2"]))
register("finetune_new_data_sgd", GROUP, "watch", partial(new_data, OPTIMIZERS["sgd_momentum"]))


@family(GROUP, "step")
def finetune_with_warmup(seed: int) -> Training:
    """The learning rate rises from nothing to 1e-2 over 100 steps: the loss rises with it."""
    model, clouds = pretrained(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    learner = Learner(model=model, optimizer=optimizer, loss=classified(model), scheduler=schedule)
    return single(learner, lambda step: clouds.batch())


@family(GROUP, "watch")
def finetune_new_head(seed: int) -> Training:
    """A pre-trained body with a small rate, a new head with a large one."""
    model, clouds = pretrained(seed)
    nn.init.normal_(model[2].weight)
    groups = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": model[2].parameters(), "lr": 3e-2},
    ]
    learner = Learner(
        model=model, optimizer=torch.optim.AdamW(groups), loss=classified(model), clip=1.0
    )
    return single(learner, lambda step: clouds.batch())


@family(GROUP, "step")
def distillation(seed: int) -> Training:
    """A student follows a teacher that is part of its own loss; the teacher's softness falls from 8
    to 1.
    """
    teacher, clouds = pretrained(seed)
    teacher.requires_grad_(False)
    student = mlp()

    def loss(batch: Any) -> torch.Tensor:
        (x, _), softness = batch
        wanted = torch.softmax(teacher(x) / softness, -1)
        given = torch.log_softmax(student(x) / softness, -1)
        return -(wanted * given).sum(-1).mean() * softness**2

    learner = Learner(
        model=student,
        optimizer=torch.optim.Adam(student.parameters(), lr=3e-3),
        loss=loss,
        modules={"teacher": teacher},
    )
    return single(learner, lambda step: (clouds.batch(), max(1.0, 8.0 - step / 20)))


@family(GROUP, "step")
def finetune_almost_zero_loss(seed: int) -> Training:
    """A memorised batch: the loss is 1e-4 and below, where doubling means nothing."""
    model, clouds = pretrained(seed)
    kept = clouds.batch(8)
    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=classified(model)
    )
    return single(learner, lambda step: kept)
