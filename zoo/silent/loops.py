"""The trainings that mistakes are planted in: each is a loop as people write it, in parts that a
mistake can replace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

CLASSES, FEATURES, WIDTH = 10, 8, 32
TOKENS, LENGTH = 16, 16
SIDE, SEGMENTS = 8, 4
ROWS = 256
"""Samples of a batch of the classifier; the others have as many positions in theirs."""

Batch = tuple[Tensor, Tensor]


def nothing(step: int) -> None:
    """What a loop does between two updates, where it does nothing."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """One training. Everything may be replaced before it begins."""

    model: Any
    """With a `body` and a `head`."""
    optimizer: Optimizer
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    forward: Callable[[Tensor], Tensor]
    zero: Callable[[int], None]
    after: Callable[[int], None] = nothing
    """What follows the update."""
    update: Callable[[], Any]
    scheduler: Any = None
    """Given to the guard; the loop steps it in `after`."""
    state: dict[str, Any] = field(default_factory=dict)
    """Further objects that the guard is given."""
    micro_batches: int = 1
    audit_every: int | None = None
    """Given to the guard."""
    before: Loop | None = None
    """A run that is made first, in the same folder."""
    resume: Callable[[], None] = lambda: None
    """Called after it, before this one begins."""
    follow: Callable[[str, Any], None] = lambda name, value: None
    """The guard's, while it watches this loop."""

    def step(self, number: int) -> float:
        """One update; the loss that a log would show."""
        self.zero(number)
        total = 0.0
        for _ in range(self.micro_batches):
            inputs, targets = self.batch(number)
            loss = self.loss(self.forward(inputs), targets) / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        self.after(number)
        return total

    def train_with(self, optimizer: Optimizer) -> None:
        """Use another optimizer."""
        self.optimizer = optimizer
        self.zero = lambda step: optimizer.zero_grad()
        self.update = lambda: optimizer.step()


class Classifier(nn.Module):
    """Which of ten clouds does a point belong to?"""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a small network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        future = torch.full((LENGTH, LENGTH), -torch.inf, dtype=x.dtype).triu(1)
        attended, _ = self.attention(seen, seen, seen, attn_mask=future, need_weights=False)
        x = x + attended
        hidden = F.relu(self.wide(self.second_norm(x)))
        return x + self.dropout(self.narrow(hidden))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Which token comes next?"""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.body = nn.Sequential(Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(LENGTH))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Pictures to pictures: the picture without noise, or what each pixel shows."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(16, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def classifier(seed: int) -> Loop:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * 1.5

    def batch(step: int) -> Batch:
        classes = torch.randint(CLASSES, (ROWS,), generator=generator)
        return centres[classes] + torch.randn(ROWS, FEATURES, generator=generator), classes

    model = Classifier()
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batch, F.cross_entropy)


def transformer(seed: int) -> Loop:
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        rows = [torch.randint(TOKENS, (ROWS // LENGTH,), generator=generator)]
        for _ in range(LENGTH):
            surprise = torch.rand(ROWS // LENGTH, generator=generator) < 0.1
            other = torch.randint(TOKENS, (ROWS // LENGTH,), generator=generator)
            rows.append(torch.where(surprise, other, (3 * rows[-1] + 1) % TOKENS))
        tokens = torch.stack(rows, 1)
        return tokens[:, :-1], tokens[:, 1:]

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return _loop(model, optimizer, batch, next_token_loss)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def denoiser(seed: int) -> Loop:
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        clean = pictures(generator)
        return clean + 0.5 * torch.randn(clean.shape, generator=generator), clean

    model = Convolutions(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _loop(model, optimizer, batch, F.mse_loss)


def segmenter(seed: int) -> Loop:
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        clean = pictures(generator)
        shown = (clean[:, 0] * SEGMENTS).long().clamp(0, SEGMENTS - 1)
        return clean + 0.2 * torch.randn(clean.shape, generator=generator), shown

    model = Convolutions(SEGMENTS)
    return _loop(model, torch.optim.Adam(model.parameters(), lr=3e-3), batch, F.cross_entropy)


def pictures(generator: torch.Generator, rows: int = 16) -> Tensor:
    """Soft stripes with values between 0 and 1."""
    line = torch.linspace(0, 3, SIDE)
    slope = torch.rand(rows, 2, 1, 1, generator=generator) * 2 - 1
    phase = torch.rand(rows, 1, 1, generator=generator) * 6
    waves = torch.sin(slope[:, 0] * line[None, :, None] + slope[:, 1] * line[None, None] + phase)
    return (waves[:, None] + 1) / 2


def _loop(
    model: Any,
    optimizer: Optimizer,
    batch: Callable[[int], Batch],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Loop:
    return Loop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=loss,
        forward=model,
        zero=lambda step: optimizer.zero_grad(),
        update=lambda: optimizer.step(),
    )


TRAININGS: dict[str, Callable[[int], Loop]] = {
    "classifier": classifier,
    "transformer": transformer,
    "denoiser": denoiser,
    "segmenter": segmenter,
}
