"""Ranks that drift apart without a NaN, and ranks that differ on purpose.

torchrun --standalone --nproc-per-node N compare_worker.py OUT scenario ...
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stepguard
from settings_of import changed
from stepguard import Guard, GuardConfig, Ranks
from stepguard.tensors.values import local_part

FEATURES, STEPS, EVERY, BAD_STEP, BAD_RANK = 4, 13, 4, 6, 1
CONFIG = GuardConfig(terminal="quiet", ranks=Ranks(compare_every=EVERY, timeout=30.0))


def layers(*, seed: int = 0, norm: str = "") -> nn.Sequential:
    torch.manual_seed(seed)
    found = [nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)]
    if norm:
        found.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*found)


def batch(step: int, *, same: bool = False) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + (0 if same else dist.get_rank()))
    return torch.randn(6, FEATURES, generator=source)


def averaged(model: nn.Module) -> nn.Module:
    """Gradients averaged by hand, with nobody to broadcast the weights."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    return model


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def train(
    model: nn.Module,
    *,
    loop: str = "step",
    optimizer: Any = None,
    before: Callable[[int, Any], None] | None = None,
    same: bool = False,
    loader: Any = None,
    config: GuardConfig = CONFIG,
) -> dict[str, Any]:
    """Train a few steps; `before` may do harm before a step. Ranks draw their own dropout."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(50 + dist.get_rank())
    guard: Guard | None = None
    if loop != "bare":
        make = stepguard.watch if loop == "watch" else Guard
        guard = make(model, optimizer, config=config, loader=loader)
    fetched = iter(guard.loader) if guard is not None and loader is not None else None
    for step in range(STEPS):
        if before is not None:
            before(step, optimizer)
        inputs = batch(step, same=same) if fetched is None else next(fetched)[0]
        if guard is not None and loop == "step":
            guard.step(lambda given: model(given).square().mean(), inputs)
        else:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    weights = [local_part(p.detach()).clone() for p in model.parameters()]
    if guard is None:
        return {"weights": weights}
    found = guard._context.incidents
    guard.close()
    return {
        "armed": guard.armed,
        "weights": weights,
        "incidents": [
            {
                "step": i.step,
                "kind": i.verdict.kind,
                "codes": [finding.code for finding in i.findings],
                "summary": i.verdict.summary,
                "rank": i.origin and i.origin.rank,
                "action": i.decision and i.decision.action,
            }
            for i in found
        ],
    }


def ddp(**more: Any) -> nn.Module:
    return DistributedDataParallel(layers(**more))


def flipped(model: nn.Module) -> Callable[[int, Any], None]:
    """One bit of one weight of one rank, once."""

    def harm(step: int, _: Any) -> None:
        if step == BAD_STEP and dist.get_rank() == BAD_RANK:
            weight = next(iter(model.parameters())).data.view(-1)[:1]
            weight.view(torch.int32).bitwise_xor_(1 << 20)

    return harm


def bitflip(loop: str) -> dict[str, Any]:
    model = ddp()
    return train(model, loop=loop, before=flipped(model))


def rate(loop: str) -> dict[str, Any]:
    def halve(step: int, optimizer: Any) -> None:
        if step == BAD_STEP and dist.get_rank() == BAD_RANK:
            optimizer.param_groups[0]["lr"] /= 2

    return train(ddp(), loop=loop, before=halve)


def seeds(loop: str) -> dict[str, Any]:
    return train(averaged(layers(seed=dist.get_rank())), loop=loop)


def samedata(loop: str) -> dict[str, Any]:
    return train(ddp(), loop=loop, same=True)


def samplers(_: str) -> dict[str, Any]:
    """Every rank shuffles with a seed of its own."""
    data = TensorDataset(torch.randn(256, FEATURES, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, seed=dist.get_rank())
    return train(ddp(), loader=DataLoader(data, batch_size=6, sampler=sampler))


def alone() -> dict[str, Any]:
    """Only one rank has a guard that compares."""
    loop = "watch" if dist.get_rank() == BAD_RANK else "bare"
    return train(ddp(), loop=loop, config=changed(CONFIG, agree_timeout=0.5))


def hsdp(loop: str, harm: str) -> dict[str, Any]:
    """Two copies of a model in two shards each (4 ranks); a bit of one shard is flipped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = layers()
    fully_shard(model, mesh=mesh)

    def flip(step: int, _: Any) -> None:
        if harm == "flip" and step == BAD_STEP and dist.get_rank() == BAD_RANK:
            weight = next(iter(model.parameters())).to_local().data.view(-1)[:1]  # type: ignore[attr-defined]
            weight.view(torch.int32).bitwise_xor_(1 << 20)

    return train(model, loop=loop, before=flip)


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DistributedDataParallel(layers()),
    "zero": lambda: DistributedDataParallel(layers()),
    "constant": lambda: DistributedDataParallel(layers()),
    "batchnorm": lambda: DistributedDataParallel(layers(norm="batch")),
    "ownnorm": lambda: DistributedDataParallel(layers(norm="batch"), broadcast_buffers=False),
    "apart": lambda: layers(seed=dist.get_rank()),
    "manual": lambda: averaged(layers()),
    "fsdp2": lambda: fully_shard(layers()),  # type: ignore[return-value,dict-item]
}


def healthy(kind: str, loop: str) -> dict[str, Any]:
    model = HEALTHY[kind]()
    optimizer = None
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
        )
    loader = _always_the_same() if kind == "constant" else None
    return train(model, loop=loop, optimizer=optimizer, loader=loader)


def _always_the_same() -> list[list[Tensor]]:
    return [[batch(0, same=True)] for _ in range(STEPS)]


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(bitflip, rate, seeds, samedata, samplers),
        *(alone, hsdp, healthy),
    )
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        kind, *arguments = name.split("-")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = SCENARIOS[kind](*arguments)
        torch.save(found, out / f"{name}.{dist.get_rank()}.pt")
        dist.barrier()
    # torch keeps meshes, and through them the group, in caches of DTensor; a thread of gloo that
    # outlives Python may abort it (process_group.py)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
