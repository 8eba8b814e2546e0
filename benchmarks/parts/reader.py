"""A small reader of noisy characters with hyper-connections mixed by an exp-space Sinkhorn, as in
the restran recipe.

Its natural failure: a learning rate far too high drives the mixing logits until `exp` overflows;
the loss is ruined some steps before that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, SIDE, STREAMS = 24, 12, 4


def glyphs() -> Tensor:
    """Fixed blurred blots, one a class: easy apart, hard under noise."""
    source = torch.Generator().manual_seed(42)
    raw = torch.randn(CLASSES, 1, SIDE // 2, SIDE // 2, generator=source)
    return F.interpolate(raw, size=(SIDE, SIDE), mode="bilinear", align_corners=False)


GLYPHS = glyphs()


def draw(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Characters with random contrast, shift and noise."""
    labels = torch.randint(CLASSES, (count,), generator=source)
    contrast = 0.5 + torch.rand(count, 1, 1, 1, generator=source)
    shift = int(torch.randint(-1, 2, (), generator=source))
    clean = GLYPHS[labels].roll(shift, -1) * contrast
    return clean + 1.2 * torch.randn(clean.shape, generator=source), labels


def sinkhorn(logits: Tensor, rounds: int = 8) -> Tensor:
    """In exp space, on purpose."""
    matrix = logits.exp()
    for _ in range(rounds):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


class Mixed(nn.Module):
    """A block inside a manifold-constrained hyper-connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.logits = nn.Linear(width, STREAMS * STREAMS)
        self.gain = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        mixing = sinkhorn(self.gain * self.logits(x.mean((-1, -2))).view(-1, STREAMS, STREAMS))
        streams = x.unsqueeze(1) * torch.diagonal(mixing, dim1=-2, dim2=-1)[:, :, None, None, None]
        return streams.sum(1) + self.block(x)


class Reader(nn.Module):
    """About 9000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.first = Mixed(8)
        self.down = nn.Sequential(
            nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.second = Mixed(16)
        self.head = nn.Linear(16 * (SIDE // 4) ** 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.down(self.first(self.stem(x))))
        return self.head(F.avg_pool2d(x, 2).flatten(1))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """On the same fresh characters every time."""
    inputs, labels = draw(1024, torch.Generator().manual_seed(99))
    model.eval()
    found = model(inputs).argmax(-1)
    model.train()
    return float((found == labels).float().mean())
