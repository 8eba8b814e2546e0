"""Two networks against each other: neither loss falls, both jump, and what one learns is the
other's new task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.healthy.data import mlp
from zoo.healthy.training import Learner, Training, Update, family, register

GROUP = "adversarial"
NOISE, ROWS = 4, 32
Arrangement = Literal["apart", "one module", "modules"]


class Pair(nn.Module):
    """Generator and discriminator in one module, as many scripts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(NOISE, 16, 2), mlp(2, 16, 1)


class Real:
    """Two clouds of points in the plane."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def points(self) -> Tensor:
        side = torch.sign(torch.randn(ROWS, 1, generator=self.generator))
        return side * torch.tensor([2.0, 2.0]) + 0.3 * torch.randn(
            ROWS, 2, generator=self.generator
        )

    def noise(self) -> Tensor:
        return torch.randn(ROWS, NOISE, generator=self.generator)


CriticLoss = Callable[[Tensor, Tensor], Tensor]
GeneratorLoss = Callable[[Tensor], Tensor]


def saturating(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def fooling(fake: Tensor) -> Tensor:
    return F.softplus(-fake).mean()


def gan(
    arrangement: Arrangement,
    critic_loss: CriticLoss,
    generator_loss: GeneratorLoss,
    between: str,
    seed: int,
) -> Training:
    """`between`: what the loop does to the critic after each update (`clip` for WGAN)."""
    pair, real = Pair(), Real(seed)
    betas = (0.5, 0.999)

    def of_critic(batch: tuple[Tensor, Tensor]) -> Tensor:
        points, noise = batch
        return critic_loss(pair.critic(points), pair.critic(pair.generator(noise).detach()))

    def of_generator(noise: Tensor) -> Tensor:
        return generator_loss(pair.critic(pair.generator(noise)))

    def updates(step: int) -> Iterator[Update]:
        yield "critic", ((real.points(), real.noise()),)
        if between == "clip":
            with torch.no_grad():
                for weight in pair.critic.parameters():
                    weight.clamp_(-0.1, 0.1)
        yield "generator", (real.noise(),)

    learners = {}
    for name, loss, other in (
        ("critic", of_critic, "generator"),
        ("generator", of_generator, "critic"),
    ):
        own = pair.get_submodule(name)
        learners[name] = Learner(
            model=pair if arrangement == "one module" else own,
            optimizer=torch.optim.Adam(own.parameters(), lr=2e-3, betas=betas),
            loss=loss,  # type: ignore[arg-type]
            modules={other: pair.get_submodule(other)} if arrangement == "modules" else None,
        )
    return Training(learners=learners, updates=updates)


def wasserstein(real: Tensor, fake: Tensor) -> Tensor:
    return fake.mean() - real.mean()


def raising(fake: Tensor) -> Tensor:
    return -fake.mean()


def least_squares(real: Tensor, fake: Tensor) -> Tensor:
    return (real - 1).square().mean() + fake.square().mean()


def near_one(fake: Tensor) -> Tensor:
    return (fake - 1).square().mean()


register("gan_two_models", GROUP, "step", partial(gan, "apart", saturating, fooling, ""))
register("gan_one_module", GROUP, "step", partial(gan, "one module", saturating, fooling, ""))
register("gan_one_module", GROUP, "watch", partial(gan, "one module", saturating, fooling, ""))
register(
    "gan_modules_of_each_other", GROUP, "step", partial(gan, "modules", saturating, fooling, "")
)
register("wgan_clipped", GROUP, "watch", partial(gan, "apart", wasserstein, raising, "clip"))
register("lsgan", GROUP, "step", partial(gan, "one module", least_squares, near_one, ""))


@family(GROUP, "step")
def wgan_gp(seed: int) -> Training:
    """The gradient penalty needs the gradient of a gradient inside the loss."""
    generator, critic, real = mlp(NOISE, 16, 2), mlp(2, 16, 1), Real(seed)

    def of_critic(batch: Any) -> Tensor:
        points, noise, mix = batch
        fake = generator(noise).detach()
        between = (mix * points + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return critic(fake).mean() - critic(points).mean() + 10 * penalty

    def of_generator(noise: Tensor) -> Tensor:
        return -critic(generator(noise)).mean()

    def updates(step: int) -> Iterator[Update]:
        yield "critic", ((real.points(), real.noise(), torch.rand(ROWS, 1)),)
        if step % 3 == 2:
            yield "generator", (real.noise(),)

    learners = {
        "critic": Learner(
            model=critic, optimizer=torch.optim.Adam(critic.parameters(), lr=2e-3), loss=of_critic
        ),
        "generator": Learner(
            model=generator,
            optimizer=torch.optim.Adam(generator.parameters(), lr=2e-3),
            loss=of_generator,
        ),
    }
    return Training(learners=learners, updates=updates)
