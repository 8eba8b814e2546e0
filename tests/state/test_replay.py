"""Running a step again leaves no trace, whatever kinds of buffers the model has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import reevaluate, rerun
from stepguard.state.python_state import SMALL
from stepguard.state.rng import capture_rng


class Odd(nn.Module):
    """Dropout, batch statistics, and buffers that are expanded, created late, or written through
    `.data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("positions", torch.arange(3.0).expand(4, 3))
        self.register_buffer("late", None)
        self.register_buffer("codebook", torch.zeros(SMALL + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.late = x.detach().mean(0)
        self.codebook.data.add_(1.0)
        return self.drop(self.norm(self.fc(x + self.positions[0])))


def _step() -> Step:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = BufferKeeper([model])
    step = Step(
        0, model, optimizer, {}, keeper, lambda x: model(x).square().mean(), (torch.randn(4, 3),)
    )
    keeper.remember()
    step.rng.append(capture_rng())
    return step


def test_step_runs_again_to_the_same_loss() -> None:
    step = _step()
    assert step.loss_fn is not None
    loss = step.loss_fn(step.micro_batches[0])
    assert isinstance(loss, Tensor)
    assert rerun(step).losses == (loss.item(),)
    assert reevaluate(step) == loss.item()


def test_running_again_leaves_buffers_gradients_and_randomness_as_they_were() -> None:
    step = _step()
    assert step.loss_fn is not None
    loss = step.loss_fn(step.micro_batches[0])
    assert isinstance(loss, Tensor)
    loss.backward()
    buffers = {name: (id(b), b.clone()) for name, b in step.model.named_buffers()}
    grads = [p.grad for p in step.model.parameters()]
    randomness = torch.get_rng_state()
    rerun(step)
    reevaluate(step)
    assert {name: id(b) for name, b in step.model.named_buffers()} == {
        name: i for name, (i, _) in buffers.items()
    }
    assert all(torch.equal(b, buffers[name][1]) for name, b in step.model.named_buffers())
    assert all(p.grad is grad for p, grad in zip(step.model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), randomness)
