"""Sequences, diffusion, learning to learn: state between steps, random difficulty, gradients of
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.healthy.data import FEATURES, ROWS, Clouds, mlp
from zoo.healthy.training import Learner, Training, Update, family, single

GROUP = "sequences and meta-learning"
WORDS, LENGTH = 12, 6


class Reader(nn.Module):
    """Characters in, characters out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.cell = nn.GRU(8, 12, batch_first=True)
        self.out = nn.Linear(12, WORDS)

    def forward(self, words: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        held, state = self.cell(self.embed(words), state)
        return self.out(held), state


@family(GROUP, "watch")
def truncated_backpropagation(seed: int) -> Training:
    """The hidden state goes from one step to the next, and is begun anew at every 50th."""
    generator = torch.Generator().manual_seed(seed)
    model = Reader()
    table = torch.randint(WORDS, (WORDS,), generator=generator)
    held: dict[str, Any] = {"state": None, "words": torch.randint(WORDS, (4,), generator=generator)}

    def loss(batch: Any) -> Tensor:
        words, state = batch
        said, held["after"] = model(words[:, :-1], state)
        return F.cross_entropy(said.flatten(0, 1), words[:, 1:].flatten())

    def updates(step: int) -> Iterator[Update]:
        if step % 50 == 0:
            held["state"] = None
        words = [held["words"]]
        for _ in range(LENGTH):
            slips = torch.rand(4, generator=generator) < 0.1
            words.append(
                torch.where(
                    slips, torch.randint(WORDS, (4,), generator=generator), table[words[-1]]
                )
            )
        held["words"] = words[-1]
        yield "only", ((torch.stack(words, 1), held["state"]),)
        held["state"] = held["after"].detach()

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=loss, clip=1.0
    )
    return Training(learners={"only": learner}, updates=updates, world=lambda: held["state"])


class Bag(nn.Module):
    """Guesses hidden words from the mean of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, 8)
        self.out = mlp(16, 16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        each = self.embed(words)
        return self.out(torch.cat([each, each.mean(1, keepdim=True).expand_as(each)], -1))


@family(GROUP, "step")
def masked_words_sometimes_none(seed: int) -> Training:
    """A batch in which nothing is masked gives a loss of exactly 0, as people write it."""
    generator = torch.Generator().manual_seed(seed)
    model = Bag()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        words = (torch.arange(LENGTH) + torch.randint(WORDS, (4, 1), generator=generator)) % WORDS
        hidden = torch.rand(4, LENGTH, generator=generator) < (0.0 if step % 41 == 40 else 0.2)
        return words.masked_fill(hidden, WORDS), words.masked_fill(~hidden, -100)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        labels = batch[1].flatten()
        missed = F.cross_entropy(model(batch[0]).flatten(0, 1), labels, reduction="sum")
        return missed / (labels != -100).sum().clamp(min=1)

    return single(
        Learner(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss),
        batch,
    )


@family(GROUP, "step")
def ctc(seed: int) -> Training:
    """CTC over short signals: the loss begins an order above where it ends and falls in stairs."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp(FEATURES, 16, 5)
    letters = torch.randn(5, FEATURES, generator=generator) * 2

    def batch(step: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(1, 5, (4, 3), generator=generator)
        signal = letters[words.repeat_interleave(3, 1)]
        return signal + 0.3 * torch.randn(signal.shape, generator=generator), words

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        said = torch.log_softmax(model(batch[0]), -1).transpose(0, 1)
        lengths = torch.full((4,), 9), torch.full((4,), 3)
        return F.ctc_loss(said, batch[1], *lengths, zero_infinity=True)

    return single(
        Learner(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss=loss),
        batch,
    )


@family(GROUP, "step")
def diffusion(seed: int) -> Training:
    """Every batch has its own noise level, so its loss says more about the level than about the
    model.
    """
    clouds = Clouds(seed)
    model = mlp(FEATURES + 1, 24, FEATURES)

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        x, _ = clouds.batch()
        return (
            x,
            torch.rand((), generator=clouds.generator),
            torch.randn(ROWS, FEATURES, generator=clouds.generator),
        )

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, time, noise = batch
        noisy = (1 - time) * x + time * noise
        said = model(torch.cat([noisy, time.expand(len(x), 1)], -1))
        return F.mse_loss(said, noise - x) / (1.05 - time)

    learner = Learner(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), loss=loss, clip=1.0
    )
    return single(learner, batch)


@family(GROUP, "step")
def maml(seed: int) -> Training:
    """Learning to learn sines: an inner step by `torch.func.functional_call`, the outer loss
    through it.
    """
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(8, 1, generator=generator) * 6 - 3
        height, shift = 0.1 + 5 * torch.rand(2, generator=generator)
        return x, height * torch.sin(x + shift)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, (x[:4],)), y[:4])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, moved, (x[4:],)), y[4:])

    learner = Learner(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), loss=loss, clip=10.0
    )
    return single(learner, batch)
