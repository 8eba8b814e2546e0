"""Small models that go wrong in one known way, with the place where it happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.records import Evidence, Origin, Reading
from stepguard.records.incident import NO_EVIDENCE
from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import capture_rng

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


@dataclass(frozen=True)
class Expected:
    """Where the first harmful value is born, and what is measured there."""

    op: str | None = None
    samples: tuple[int, ...] | None = None
    phase: str | None = None
    module: str | None = None
    node: str | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    evidence: Evidence = NO_EVIDENCE


def at(op: str | None = None, samples: tuple[int, ...] | None = (1,), **expected: Any) -> Expected:
    """Fields of `Expected`, and of the evidence for all other names."""
    names = {field.name for field in fields(Expected)}
    place = {name: expected.pop(name) for name in names & expected.keys()}
    return Expected(op, samples, evidence=Evidence(**expected), **place)


@dataclass
class Case:
    """A model, a batch, a loss; and what is expected of them."""

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Any]
    expected: Expected


def find(case: Case) -> Origin:
    """Run the one step and locate; the step must be bad."""
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    loop = Loop(case.model, optimizer, lambda batch: case.loss(case.model, batch))
    origin = loop.step(0, [case.batch])
    assert origin is not None, "the step was healthy"
    return origin


def check(case: Case) -> Origin:
    """The place must be exact."""
    origin, wanted = find(case), case.expected
    for name in ("phase", "module", "op", "node", "tensor"):
        assert getattr(origin, name) == getattr(wanted, name), (name, origin)
    assert wanted.samples is None or origin.samples == wanted.samples, origin
    assert wanted.index is None or origin.inputs[0].index == wanted.index, origin
    stated = origin.evidence.stated()
    for name, value in wanted.evidence.stated().items():
        about = pytest.approx(value) if isinstance(value, float) else value
        assert stated.get(name) == about, (name, stated)
    assert origin.reproduced is True
    return origin


def mse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).pow(2).mean()


def in_net(function: Function, x: Tensor | None, expected: Expected) -> Case:
    """The function of a `Net` goes wrong, or with a node its gradient does."""
    x = noise(4, 3) if x is None else x
    phase = "backward" if expected.node else "forward"
    batch = {"x": x, "y": noise(len(x), 1, seed=5)}
    return Case(Net(function), batch, mse, replace(expected, phase=phase, module="act"))


def in_loss(
    loss: Callable[[nn.Module, Any], Any],
    batch: dict[str, Tensor],
    expected: Expected,
    model: nn.Module | None = None,
) -> Case:
    """The loss expression over a linear model goes wrong, or its gradient does."""
    model = nn.Linear(3, 3) if model is None else model
    phase = "backward" if expected.node else "loss"
    return Case(model, {"x": noise(4, 3), **batch}, loss, replace(expected, phase=phase))


BAD_LOSS = Reading(step=0, loss=math.nan, micro_losses=(math.nan,), grads_finite=False)
BAD_GRADIENT = Reading(step=0, loss=1.0, micro_losses=(1.0,), grads_finite=False)


def step_of(loss_fn: Callable[[Any], Tensor], model: nn.Module, *micro_batches: Tensor) -> Step:
    """A recorded step that nobody has run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = BufferKeeper([model])
    keeper.remember()
    rng = [capture_rng() for _ in micro_batches]
    return Step(0, model, optimizer, {}, keeper, loss_fn, micro_batches, rng)
