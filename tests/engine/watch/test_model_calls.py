"""Output gradients of a watched model: held until the step is judged, and used only if nobody wrote
into them.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import quiet


class Doubling(torch.autograd.Function):
    """Its backward writes into the gradient it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(2.0)


class Net(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(4, 3), writes

    def forward(self, x: Tensor) -> Tensor:
        out = torch.log(self.inner(x) * 0.0 + x[:, :3])
        return Doubling.apply(out) if self.writes else out


def _capture(model: nn.Module) -> Any:
    (capture,) = model._compiled_call_impl.hearers  # type: ignore[attr-defined]
    return capture


@pytest.mark.parametrize("writes", [False, True])
def test_a_gradient_that_was_written_to_is_not_used_for_a_replay(writes: bool) -> None:
    model = Net(writes=writes)
    with stepguard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quiet()):
        model(torch.ones(2, 4)).square().sum().backward()
        assert (_capture(model).model_fn() is None) == writes


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_is_held_as_it_is_and_let_go_when_its_step_is_judged(fused: bool) -> None:
    model = Net(writes=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    came: list[weakref.ref[Tensor]] = []
    with stepguard.watch(model, optimizer, config=quiet()) as guard:
        for step in range(4):
            optimizer.zero_grad()
            out = model(torch.rand(2, 4) + 1.0)
            out.register_hook(lambda g: came.append(weakref.ref(g)))
            out.square().mean().backward()
            assert _capture(model).calls[0].gradients.held[0] is came[step]()
            del out
            optimizer.step()
        guard.port.settle()
        assert [gradient() for gradient in came] == [None] * 4
