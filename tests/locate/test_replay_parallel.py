"""Replays of data-parallel and compiled models: no collective, and faults of compiled code only."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from process_group import part

from .cases import noise, with_row
from .loop import Loop


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.bn, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(torch.exp(self.fc(x))))


def _one_rank_locates(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _locate_as(rank)
    part()


def _locate_as(rank: int) -> None:
    model = DistributedDataParallel(Normed())

    def loss(x: Tensor) -> Tensor:
        value = model(x).pow(2).mean()
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        return value * len(x) / count

    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
    attributes = set(vars(model))
    if rank == 0:
        origin = loop.step(0, [with_row(900.0, row=2)])
        assert origin is not None
        place = (origin.phase, origin.module, origin.op, origin.samples)
        assert place == ("forward", "", "aten.exp", (2,)), origin
    else:  # takes part in the step, and in nothing of the replay
        keeper = [p.detach().clone() for p in model.parameters()]
        loss(noise(4, 3)).backward()
        assert all(torch.equal(a, b) for a, b in zip(keeper, model.parameters(), strict=True))
    dist.barrier()
    assert set(vars(model)) == attributes
    model.zero_grad()
    loss(noise(4, 3, seed=rank)).backward()  # both ranks still agree afterwards
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    mine = grads.clone()
    dist.all_reduce(grads)
    assert torch.allclose(grads / 2, mine)


def test_one_rank_of_two_locates_without_the_other(tmp_path: Path) -> None:
    mp.start_processes(_one_rank_locates, args=(str(tmp_path),), nprocs=2, start_method="spawn")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_model_is_replayed_eagerly_and_named() -> None:
    model: Any = torch.compile(Normed(), backend="eager")
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda x: model(x).pow(2).mean()
    )
    origin = loop.step(0, [with_row(900.0)])
    assert origin is not None
    assert (origin.phase, origin.module, origin.op, origin.samples) == (
        "forward",
        "",
        "aten.exp",
        (1,),
    )


def _wrong_backend(graph: Any, example: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return [out * math.nan for out in graph.forward(*args)]

    return run


@pytest.mark.usefixtures("fresh_dynamo")
def test_fault_that_only_the_compiled_graph_has() -> None:
    inner = nn.Linear(3, 1)
    model: Any = torch.compile(inner, backend=_wrong_backend)
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda x: model(x).pow(2).mean()
    )
    origin = loop.step(0, [noise(4, 3)])
    assert origin is not None
    assert origin.reproduced is True and origin.evidence.compiled_only
    assert (origin.phase, origin.module, origin.op) == ("forward", "", "torch.compile")
