"""A fault that only compiled code has is located at the compiled region; eager is its witness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locate.guarded import code, first_incident, noise
from stepguard import Incident

# dynamo looks at the gradients of a region's inputs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
WIDTH = 4
bad = {"forward": False, "backward": False}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    bad.update(forward=False, backward=False)
    torch.compiler.reset()


class Spoils(torch.autograd.Function):
    """Leaves the values; in the backward the gradients are lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("nan") if bad["backward"] else grad


def backend(graph: Any, example: Any) -> Callable[..., Any]:
    """A compiler whose code is wrong now and then."""

    def run(*args: Any) -> Any:
        out = graph(*(Spoils.apply(one) if one.requires_grad else one for one in args))
        if bad["forward"]:
            out[0].data.view(-1)[-1] = float("nan")
        return out

    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.block: Any = Block()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.inner(x)))
        return out


def incident_of(model: Any, way: str) -> Incident:
    def batch(step: int) -> Tensor:
        bad[way] = step > 0
        return noise(step, 4, WIDTH)

    return first_incident(model, lambda x: model(x).square().mean(), batch)


def wrapped(net: Net) -> Any:
    net.block = torch.compile(net.block, backend=backend)
    return net


def in_place(net: Net) -> Any:
    net.block.compile(backend=backend)
    return net


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("compiled", [wrapped, in_place])
def test_the_region_is_the_origin(compiled: Callable[[Net], Any], way: str) -> None:
    torch.manual_seed(0)
    incident = incident_of(compiled(Net()), way)
    origin = incident.origin
    assert origin is not None
    assert (origin.phase, origin.module, origin.op) == (way, "block", "torch.compile")
    assert code(incident) == "SG703"
    for one in origin.evidence.witnesses:
        assert one.path == "eager" and one.finite and one.agrees and one.value is not None
    assert len(origin.evidence.witnesses) == (way == "forward")


def test_of_a_model_compiled_as_a_whole_the_model_is_the_region() -> None:
    torch.manual_seed(0)
    incident = incident_of(torch.compile(Net(), backend=backend), "forward")
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module) == ("forward", "")


def test_everything_that_was_compiled_is_as_before() -> None:
    torch.manual_seed(0)
    net = wrapped(Net())
    before = vars(net.block)["forward"]
    incident_of(net, "forward")
    assert vars(net.block)["forward"] is before
