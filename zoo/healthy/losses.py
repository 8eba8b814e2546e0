"""Losses that look ill: heavy tails, terms that are switched on, negative, zero, huge."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.healthy.data import FEATURES, ROWS, Clouds, mlp, regression, squared
from zoo.healthy.training import Learner, Training, Update, Way, family, register, single

GROUP = "losses"


@family(GROUP, "step")
def heavy_tailed_labels(seed: int) -> Training:
    """Cauchy noise on the targets: single batches with a thousand times the usual loss."""
    model, drawn = mlp(outputs=1), regression(seed)
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return x, y + 0.1 * torch.empty(ROWS, 1).cauchy_(generator=generator)

    learner = Learner(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=squared(model),
        clip=1.0,
    )
    return single(learner, batch)


@family(GROUP, "watch")
def heavy_tailed_weights(seed: int) -> Training:
    """Importance weights of a few samples carry the whole loss."""
    model, drawn = mlp(outputs=1), regression(seed)

    def loss(batch: Any) -> Tensor:
        (x, y), weight = batch
        return (weight * (model(x) - y).square()).mean()

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), loss=loss, clip=1.0
    )
    return single(learner, lambda step: (drawn(step), (2.5 * torch.randn(ROWS, 1)).exp()))


class Autoencoder(nn.Module):
    """A VAE of a few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(FEATURES, 16, 8), mlp(4, 16, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        latent = mean + (0.5 * spread).exp() * torch.randn(mean.shape)
        missed = (self.decoder(latent) - x).square().sum(-1).mean()
        distance = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(-1).mean()
        return missed, distance


def autoencoder(weight_at: Any, seed: int) -> Training:
    clouds, model = Clouds(seed), Autoencoder()

    def loss(batch: tuple[Tensor, float]) -> dict[str, Tensor]:
        missed, distance = model(batch[0])
        return {"missed": missed, "distance": batch[1] * distance}

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss
    )
    return single(learner, lambda step: (clouds.batch()[0], weight_at(step)))


VAES: dict[str, tuple[Any, Way]] = {
    "vae": (lambda step: 1.0, "watch"),
    "vae_kl_annealed": (lambda step: min(4.0, step / 50), "step"),
    "vae_kl_cyclic": (lambda step: 3.0 * (step % 75) / 75, "step"),
}
for name, (weight_at, way) in VAES.items():
    register(name, GROUP, way, partial(autoencoder, weight_at))


@family(GROUP, "step")
def term_switched_on(seed: int) -> Training:
    """A second term joins at step 150 and lifts the loss twentyfold."""
    model, drawn = mlp(outputs=1), regression(seed)
    now = {"step": 0}

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        first = F.mse_loss(model(batch[0]), batch[1])
        if now["step"] < 150:
            return first
        return first + 0.5 * sum((w.abs().sum() for w in model.parameters()), torch.zeros(()))

    def updates(step: int) -> Iterator[Update]:
        now["step"] = step
        yield "only", (drawn(step),)

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss
    )
    return Training(learners={"only": learner}, updates=updates)


@family(GROUP, "watch")
def gumbel_temperature_annealed(seed: int) -> Training:
    """Discrete choices through a softmax that hardens from 5 to 0.2: gradients grow as it does."""
    clouds = Clouds(seed)
    model = nn.ModuleDict({"choose": mlp(FEATURES, 16, 6), "decode": nn.Linear(6, FEATURES)})

    def loss(batch: tuple[Tensor, float]) -> Tensor:
        choice = F.gumbel_softmax(model["choose"](batch[0]), tau=batch[1], hard=True)
        return F.mse_loss(model["decode"](choice), batch[0])

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss
    )
    return single(learner, lambda step: (clouds.batch()[0], max(0.2, 5.0 * 0.985**step)))


@family(GROUP, "step")
def negative_likelihood(seed: int) -> Training:
    """A density fit: the loss crosses 0 and goes on falling."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp(FEATURES, 16, 2)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, spread = model(batch[0]).chunk(2, -1)
        return (spread + 0.5 * ((batch[1] - mean) / spread.exp()).square()).mean()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, FEATURES, generator=generator)
        return x, 0.02 * x[:, :1]

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=loss, clip=5.0
    )
    return single(learner, batch)


@family(GROUP, "step")
def hinge_that_reaches_zero(seed: int) -> Training:
    """Every margin is kept: the loss is exactly 0 for long stretches, and then a point comes too
    near.
    """
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(FEATURES, 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, FEATURES, generator=generator)
        side = torch.sign(x[:, :1])
        return x + 2 * side * F.one_hot(torch.tensor(0), FEATURES), side

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.relu(1 - batch[1] * model(batch[0])).mean()

    return single(
        Learner(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), loss=loss),
        batch,
    )


@family(GROUP, "watch")
def huge_loss(seed: int) -> Training:
    """Prices in cents: the loss begins at 1e12."""
    model, drawn = mlp(outputs=1), regression(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return x, 1e6 * y

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1.0), loss=squared(model)
    )
    return single(learner, batch)


@family(GROUP, "step")
def sum_instead_of_mean(seed: int) -> Training:
    """The loss is a sum over rows, and the number of rows is another one in every batch."""
    model, drawn = mlp(outputs=1), regression(seed)
    generator = torch.Generator().manual_seed(seed)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        rows = int(torch.randint(1, ROWS, (), generator=generator))
        return x[:rows], y[:rows]

    return single(
        Learner(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), loss=loss),
        batch,
    )
