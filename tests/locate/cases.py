"""Small models that go wrong in one known way, with the place where it happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.records import Evidence, Origin
from stepguard.records.incident import NO_EVIDENCE

from .loop import Loop

Function = Callable[[Tensor], Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_row(value: float, row: int = 1, count: int = 4, width: int = 3) -> Tensor:
    """Random features with one constant sample."""
    x = noise(count, width)
    x[row] = value
    return x


class Apply(nn.Module):
    """A module around one function, so that places have a name."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """Linear, a function, linear."""

    def __init__(self, function: Function, *, bias: bool = False, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(width, 4, bias=bias)
        self.act = Apply(function)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.fc(x)))


@dataclass
class Case:
    """A model, a batch, a loss; and where the first harmful value is born."""

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Any]
    phase: str
    module: str | None
    op: str | None
    node: str | None = None
    tensor: str | None = None
    samples: tuple[int, ...] | None = None
    evidence: Evidence = NO_EVIDENCE
    index: tuple[int, ...] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda p: torch.optim.SGD(p, lr=0.01)
    )


def find(case: Case) -> Origin:
    """Run the one step and locate; the step must be bad."""
    loop = Loop(
        case.model,
        case.optimizer(case.model.parameters()),
        lambda batch: case.loss(case.model, batch),
    )
    batches = case.batch if isinstance(case.batch, list) else [case.batch]
    origin = loop.step(0, batches)
    assert origin is not None, "the step was healthy"
    return origin


def check(case: Case) -> Origin:
    """The place must be exact."""
    origin = find(case)
    said = (origin.phase, origin.module, origin.op, origin.node)
    assert said == (case.phase, case.module, case.op, case.node), origin
    assert origin.tensor == case.tensor, origin
    if case.samples is not None:
        assert origin.samples == case.samples, origin
    stated = origin.evidence.stated()
    for name, value in case.evidence.stated().items():
        wanted = pytest.approx(value) if isinstance(value, float) else value
        assert stated.get(name) == wanted, (name, stated)
    if case.index is not None:
        assert origin.inputs[0].index == case.index
    assert origin.reproduced is True
    return origin


def mse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def net_case(function: Function, x: Tensor | None = None, **expected: Any) -> Case:
    """A `Net` on `x` with random targets."""
    features = noise(4, 3) if x is None else x
    return Case(
        Net(function), {"x": features, "y": noise(len(features), 1, seed=5)}, mse, **expected
    )


NEGATIVE_INFINITY = -math.inf
