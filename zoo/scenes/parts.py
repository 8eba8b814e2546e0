"""Building blocks that several cases share: reproducible tensors, one optimizer, one small
attention.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

INF, NAN = math.inf, math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=generator(seed))


def tokens(*shape: int, seed: int = 0, low: int = 0, high: int = 8) -> Tensor:
    return torch.randint(low, high, shape, generator=generator(seed))


def sgd(model: nn.Module, lr: float = 0.01, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def chain(**modules: nn.Module) -> nn.Sequential:
    """A Sequential whose parts have names."""
    return nn.Sequential(OrderedDict(modules))


def regression(step: int, count: int = 4, features: int = 3, outputs: int = 1) -> dict[str, Tensor]:
    """A harmless batch with inputs `x` and targets `y`."""
    return {"x": randn(count, features, seed=step), "y": randn(count, outputs, seed=step + 1)}


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Memory that nobody fills is reproducibly NaN, as deterministic mode leaves it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def uninitialised(*shape: int) -> Tensor:
    """torch.empty whose memory is reproducibly NaN."""
    with new_memory_is_nan():
        return torch.empty(*shape)


class Attention(nn.Module):
    """Single-head attention with an additive mask and a plain softmax; `safe` repairs dead rows
    before it.
    """

    def __init__(self, width: int = 4, *, safe: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.safe = safe

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(x.shape[-1]) + mask
        if self.safe:
            dead = torch.isneginf(scores).all(-1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
        else:
            weights = torch.softmax(scores, dim=-1)
        values: Tensor = self.v(x)
        return weights @ values


class Lambda(nn.Module):
    """A named place for one formula."""

    def __init__(self, formula: Callable[..., Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, *args: Tensor) -> Tensor:
        return self.formula(*args)
