"""Models that change under training: experts, sparse tables, frozen and pruned parts, running
statistics, EMA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.healthy.data import CLASSES, FEATURES, Clouds, classified, mlp, pretrained
from zoo.healthy.training import Learner, Training, Update, family, single

GROUP = "structure"


class Experts(nn.Module):
    """Four experts of which each row asks one: some get no row, and so no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chances = torch.softmax(self.gate(x), -1)
        best, which = chances.max(-1)
        said = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = which == number
            if rows.any():
                said = said.index_put((rows,), expert(x[rows]))
        return said * best[:, None]


@family(GROUP, "watch")
def mixture_of_experts(seed: int) -> Training:
    clouds, model = Clouds(seed), Experts()
    learner = Learner(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=classified(model),
    )
    return single(learner, lambda step: clouds.batch(8))


@family(GROUP, "step")
def sparse_embedding(seed: int) -> Training:
    """Sparse gradients under SparseAdam, with words that come rarely."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Embedding(50, 4, sparse=True)
    wanted = torch.randn(50, 4, generator=generator)

    def batch(step: int) -> Tensor:
        return (50 * torch.rand(8, generator=generator) ** 3).long()

    def loss(words: Tensor) -> Tensor:
        return F.mse_loss(model(words), wanted[words])

    return single(
        Learner(
            model=model, optimizer=torch.optim.SparseAdam(model.parameters(), lr=0.05), loss=loss
        ),
        batch,
    )


@family(GROUP, "watch")
def progressive_unfreezing(seed: int) -> Training:
    """The head alone, then the body as well: parameters begin to move in mid-run."""
    model, clouds = pretrained(seed)
    clouds = Clouds(seed + 1)
    model[0].requires_grad_(False)
    learner = Learner(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=classified(model),
    )

    def updates(step: int) -> Iterator[Update]:
        if step == 100:
            model[0].requires_grad_(True)
        yield "only", (clouds.batch(),)

    return Training(learners={"only": learner}, updates=updates)


@family(GROUP, "step", "watch")
def pruning_in_the_loop(seed: int) -> Training:
    """Every 50 steps the smallest tenth of the weights is set to 0 and kept there by the loop."""
    model, clouds = pretrained(seed)
    masks = {name: torch.ones_like(w) for name, w in model.named_parameters() if w.dim() == 2}
    learner = Learner(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=classified(model)
    )

    @torch.no_grad()
    def updates(step: int) -> Iterator[Update]:
        with torch.enable_grad():
            yield "only", (clouds.batch(),)
        for name, mask in masks.items():
            weight = model.get_parameter(name)
            if step % 50 == 49:
                mask.copy_(weight.abs() > weight.abs().quantile(0.1 * (step // 50 + 1)))
            weight.mul_(mask)

    return Training(learners={"only": learner}, updates=updates, world=lambda: masks)


class Normed(nn.Module):
    """BatchNorm, dropout, and a plain number and a tensor on the module that the forward pass
    changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(FEATURES, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, CLASSES),
        )
        self.drop = nn.Dropout(0.3)
        self.calls, self.usual = 0, torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        held = self.drop(torch.relu(self.norm(self.first(x))))
        self.calls += 1
        self.usual = 0.9 * self.usual + 0.1 * held.detach().mean(0)
        return self.last(held)


@family(GROUP, "watch")
def batchnorm_and_dropout(seed: int) -> Training:
    """Evaluated every 50 steps in between, as loops do."""
    clouds, model = Clouds(seed), Normed()
    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=classified(model)
    )
    seen: list[Tensor] = []

    def updates(step: int) -> Iterator[Update]:
        yield "only", (clouds.batch(),)
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                seen.append(learner.loss(clouds.batch()))  # type: ignore[arg-type]
            model.train()

    world = lambda: [model.calls, model.usual, seen]  # noqa: E731
    return Training(learners={"only": learner}, updates=updates, world=world)


@family(GROUP, "watch")
def ema_in_the_loop(seed: int) -> Training:
    """An averaged copy that the loop updates, with its counter and a warm-up of its decay."""
    clouds, model = Clouds(seed), mlp()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98)
    )
    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=classified(model)
    )

    def updates(step: int) -> Iterator[Update]:
        yield "only", (clouds.batch(),)
        average.update_parameters(model)

    return Training(learners={"only": learner}, updates=updates, world=average.state_dict)


@family(GROUP, "step")
def gradient_accumulation(seed: int) -> Training:
    """Four micro-batches an update, of different sizes, clipped."""
    clouds, model = Clouds(seed), mlp()

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) / 4

    learner = Learner(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss, clip=1.0
    )
    return single(learner, lambda step: [clouds.batch(rows) for rows in (2, 8, 4, 16)])
