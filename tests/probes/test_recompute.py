"""SG924: checkpointed blocks whose second forward differs, and those whose does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stepguard
from stepguard import GuardConfig, Probes
from stepguard.journal import read_run

STEPS = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(self.wide(x).relu()))


class Net(nn.Module):
    def __init__(self, blocks: int, shared: bool, **settings: bool) -> None:
        super().__init__()
        first = Block()
        rest = [first if shared else Block() for _ in range(blocks - 1)]
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([first, *rest])
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        return x


def said(folder: Path, net: nn.Module, micro_batches: int = 1) -> list[str]:
    """Codes that a watched run of a few steps reports, and the module that is named."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=2), terminal="quiet")
    with stepguard.watch(net, optimizer, config=config) as guard:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(micro_batches):
                generator = torch.Generator().manual_seed(10 * step + part)
                batch = torch.randn(32, 8, generator=generator)
                (net(batch) - batch.roll(1, 1)).square().mean().backward()
            optimizer.step()
        assert guard.armed
    notes = [note for note in read_run(folder).notes if note.get("kind") == "silent"]
    return [str(note["summary"]) for note in notes]


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_without_its_random_state_is_named(tmp_path: Path, reentrant: bool) -> None:
    torch.manual_seed(0)
    net = Net(1, shared=False, use_reentrant=reentrant, preserve_rng_state=False)
    (only,) = said(tmp_path, net)
    assert only.startswith("SG924") and "it draws random numbers" in only
    assert "blocks.0" in only


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_checkpoints_that_restore_the_random_state_are_healthy(
    tmp_path: Path, reentrant: bool, shared: bool, micro_batches: int
) -> None:
    torch.manual_seed(0)
    net = Net(4, shared, use_reentrant=reentrant)
    assert said(tmp_path, net, micro_batches) == []


@pytest.mark.slow
def test_a_few_of_many_blocks_are_enough(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(12, shared=False, use_reentrant=False, preserve_rng_state=False)
    (only,) = said(tmp_path, net)
    assert only.startswith("SG924")


def gradient_of_a_gradient(x: Tensor, net: nn.Module) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return slope


def under_autocast(x: Tensor, net: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made: Tensor = checkpoint(net, x, use_reentrant=False)
    return made.float()


class Wrapped(nn.Module):
    def __init__(self, around: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.around = around
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.inner.append(nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x, self.inner)


@pytest.mark.parametrize("around", [gradient_of_a_gradient, under_autocast])
def test_other_second_passes_are_no_difference(
    tmp_path: Path, around: Callable[[Tensor, nn.Module], Tensor]
) -> None:
    torch.manual_seed(0)
    assert said(tmp_path, Wrapped(around)) == []
