"""Short guarded runs that end up in a folder: a rewind, a restart, a second run, part of a step.

As a worker it is one of two ranks of DDP with a NaN in the data of rank 1 at step 5:
torchrun --standalone --nproc-per-node 2 real_runs.py OUT
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stepguard
from distributed.launch import launch
from process_group import gloo
from settings_of import config_of
from stepguard import Guard, GuardConfig, Probes

Batch = tuple[Tensor, Tensor]


def batch(number: int, *, bad: bool = False, rows: slice = slice(None)) -> Batch:
    """Batch `number`; a bad one holds NaN in these rows of the input."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 4, generator=generator)
    y = x.sum(1, keepdim=True)
    if bad:
        x[rows] = math.nan
    return x, y


def build(folder: Path, **settings: Any) -> tuple[nn.Module, Guard, Callable[[Batch], Tensor]]:
    """A tiny model, its guard and its loss function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"terminal": "quiet", "probation": 4, "snapshot_every": 8, **settings}
    guard = Guard(model, optimizer, config=config_of(run_dir=folder, **config))

    def loss_fn(batch: Batch) -> Tensor:
        x, y = batch
        return (model(x) - y).pow(2).mean()

    return model, guard, loss_fn


def rewound(folder: Path) -> Path:
    """60 batches. 20 and 50 have one bad sample, 30-33 are bad throughout, 40 meets NaN weights."""
    model, guard, loss_fn = build(folder)
    for number in range(60):
        if number == 40:
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan
        if number in (20, 50):
            guard.step(loss_fn, batch(number, bad=True, rows=slice(3, 4)))
        else:
            guard.step(loss_fn, batch(number, bad=30 <= number < 34))
    guard.close()
    return folder


def in_part(folder: Path) -> Path:
    """20 steps of 4 micro-batches; of step 12 the second one is bad."""
    _, guard, loss_fn = build(folder)
    for number in range(20):
        parts = [batch(4 * number + part, bad=number == 12 and part == 1) for part in range(4)]
        guard.step(loss_fn, *parts)
    guard.close()
    return folder


def fixed(folder: Path) -> Path:
    """A run with a bad batch 9, and in the same folder the run after the bug was fixed."""
    for bad in (9, None):
        _, guard, loss_fn = build(folder)
        for number in range(20):
            guard.step(loss_fn, batch(number, bad=number == bad))
        guard.close()
    return folder


def restarted(folder: Path) -> Path:
    """30 steps, then a new guard that restores the checkpoint of step 24 and goes on to 40."""
    _, guard, loss_fn = build(folder, checkpoint_every=8)
    for number in range(30):
        guard.step(loss_fn, batch(number, bad=number == 5))
        if number % 8 == 7:
            guard.save()
    guard.close()
    _, guard, loss_fn = build(folder, checkpoint_every=8)
    for number in range(guard.restore(), 40):
        guard.step(loss_fn, batch(number))
    guard.close()
    return folder


def silently_wrong(folder: Path) -> Path:
    """A healthy-looking run that never zeroes its gradients, looked at three times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=3), terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(9):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return folder


def train_rank(folder: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=folder, terminal="quiet")
    guard = Guard(model, optimizer, config=config)
    for step in range(8):
        x = torch.full((2, 4), 1.0 + dist.get_rank())
        if step == 5 and dist.get_rank() == 1:
            x[0, 0] = math.nan

        def loss_fn(x: Tensor) -> Tensor:
            return model(x).pow(2).mean()

        guard.step(loss_fn, x)
    guard.close()


def two_ranks(folder: Path) -> Path:
    """Train in two processes over gloo; both ranks write into the folder that is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    code, log = launch(Path(__file__), folder, [], 120)
    assert code == 0, log[-2000:]
    return folder / "run"


if __name__ == "__main__":
    with gloo():
        train_rank(Path(sys.argv[1]) / "run")
