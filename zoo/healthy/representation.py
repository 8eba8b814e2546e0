"""Self-supervised learning: target networks, queues, temperatures, and losses that say little about
progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.healthy.data import FEATURES, Clouds, copied, follow, mlp
from zoo.healthy.training import Learner, Training, Update, family, single

GROUP = "self-supervised"


def two_views(clouds: Clouds) -> tuple[Tensor, Tensor]:
    x, _ = clouds.batch()
    return x + 0.1 * torch.randn(x.shape), x + 0.1 * torch.randn(x.shape)


@family(GROUP, "step")
def byol(seed: int) -> Training:
    """A student predicts what its own slow copy says of another view."""
    clouds = Clouds(seed)
    model = nn.ModuleDict({"online": mlp(FEATURES, 16, 8), "head": mlp(8, 8, 8)})
    target = copied(model["online"], partial(mlp, FEATURES, 16, 8))

    def loss(views: tuple[Tensor, Tensor]) -> Tensor:
        said = model["head"](model["online"](views[0]))
        with torch.no_grad():
            wanted = target(views[1])
        return 2 - 2 * F.cosine_similarity(said, wanted).mean()

    def updates(step: int) -> Iterator[Update]:
        yield "student", (two_views(clouds),)
        follow(target, model["online"], 0.05)

    learner = Learner(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), loss=loss
    )
    return Training(learners={"student": learner}, updates=updates, world=target.state_dict)


class Queue(nn.Module):
    """An encoder with a queue of keys as a buffer; the momentum encoder is in the same module."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.query = mlp(FEATURES, 16, 8)
        self.key = copied(self.query, partial(mlp, FEATURES, 16, 8))
        self.register_buffer("keys", F.normalize(torch.randn(64, 8, generator=generator), dim=-1))
        self.register_buffer("next", torch.zeros((), dtype=torch.long))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.query(one), dim=-1)
        with torch.no_grad():
            key = F.normalize(self.key(other), dim=-1)
        near = (query * key).sum(-1, keepdim=True)
        logits = torch.cat([near, query @ self.keys.clone().T], -1) / 0.1
        self.put(key)
        return F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))

    @torch.no_grad()
    def put(self, key: Tensor) -> None:
        at = int(self.next)
        self.keys[at : at + len(key)] = key
        self.next.fill_((at + len(key)) % len(self.keys))


@family(GROUP, "watch")
def moco(seed: int) -> Training:
    """The queue of keys is a buffer that the forward pass writes."""
    clouds = Clouds(seed)
    model = Queue(clouds.generator)

    def updates(step: int) -> Iterator[Update]:
        yield "query", (two_views(clouds),)
        follow(model.key, model.query, 0.05)

    learner = Learner(
        model=model,
        optimizer=torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9),
        loss=lambda views: model(*views),
    )
    return Training(learners={"query": learner}, updates=updates)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(FEATURES, 16, 8)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        left, right = (F.normalize(self.encoder(view), dim=-1) for view in (one, other))
        logits = self.log_scale.exp().clamp(max=100) * left @ right.T
        wanted = torch.arange(len(one))
        return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2


@family(GROUP, "step")
def contrastive_learnt_temperature(seed: int) -> Training:
    """The temperature is a weight, and the number of negatives changes with the batch."""
    clouds, model = Clouds(seed), Contrast()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        one, other = two_views(clouds)
        rows = (8, 32, 16)[step % 3]
        return one[:rows], other[:rows]

    learner = Learner(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda views: model(*views),
    )
    return single(learner, batch)


@family(GROUP, "watch")
def centred_teacher(seed: int) -> Training:
    """DINO-like: the teacher's outputs are centred by a running mean that the loop keeps, and its
    heat rises.
    """
    clouds = Clouds(seed)
    student = mlp(FEATURES, 16, 8)
    teacher = copied(student, partial(mlp, FEATURES, 16, 8))
    centre = torch.zeros(8)

    def loss(batch: Any) -> Tensor:
        one, wanted = batch
        return -(wanted * torch.log_softmax(student(one) / 0.1, -1)).sum(-1).mean()

    def updates(step: int) -> Iterator[Update]:
        one, other = two_views(clouds)
        with torch.no_grad():
            said = teacher(other)
            wanted = torch.softmax((said - centre) / (0.04 + 0.03 * min(1.0, step / 100)), -1)
            centre.lerp_(said.mean(0), 0.1)
        yield "student", ((one, wanted),)
        follow(teacher, student, 0.02)

    learner = Learner(
        model=student,
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3),
        loss=loss,
        clip=3.0,
    )
    return Training(
        learners={"student": learner},
        updates=updates,
        world=lambda: [centre, dict(teacher.state_dict())],
    )
