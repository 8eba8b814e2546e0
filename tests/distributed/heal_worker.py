"""A rank whose weights or optimizer slots are damaged, and others that hold a copy, or do not.

torchrun --standalone --nproc-per-node N heal_worker.py OUT engine-loop-harm ...
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

import stepguard
from distributed.compare_worker import BAD_RANK, BAD_STEP, HEALTHY, STEPS, batch, layers
from settings_of import changed
from stepguard import Guard, GuardConfig, Ranks, Snapshots, TrainingHalted
from stepguard.tensors.values import local_part

CONFIG = GuardConfig(terminal="quiet", ranks=Ranks(timeout=30.0), snapshots=Snapshots(every=4))


def built(engine: str) -> tuple[nn.Module, Any]:
    if engine == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = layers()
        fully_shard(model, mesh=mesh)
    else:
        model = HEALTHY[engine]()  # type: ignore[assignment]
    if engine == "zero":
        return model, ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
        )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@torch.no_grad()
def spoil(model: nn.Module, optimizer: Any, harm: str) -> None:
    """Damage the first parameter of this rank, or its moments."""
    parameter = next(iter(model.parameters()))
    if harm == "weight":
        local_part(parameter).view(-1)[0] = torch.nan
    if harm == "slot":
        # ZeroRedundancyOptimizer keeps the moments of its own share only
        state = getattr(optimizer, "optim", optimizer).state
        slots = next(state[p] for p in model.parameters() if state.get(p))
        local_part(slots["exp_avg"]).view(-1)[0] = torch.inf
    if harm == "flip":
        local_part(parameter).data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def train(engine: str, loop: str, harm: str, leave_out: int = -1) -> dict[str, Any]:
    model, optimizer = built(engine)
    torch.manual_seed(50 + dist.get_rank())
    config = CONFIG
    if harm == "flip":
        config = changed(CONFIG, compare_ranks_every=4, anomalies="act")
    guard: Guard | None = None
    if loop != "bare":
        make = stepguard.watch if loop == "watch" else Guard
        guard = make(model, optimizer, config=config)
    halted = False
    try:
        for step in range(STEPS):
            if step == BAD_STEP and dist.get_rank() == BAD_RANK and guard is not None:
                spoil(model, optimizer, harm)
            _step(guard, loop, model, optimizer, batch(step), no_update=step == leave_out)
    except TrainingHalted:
        halted = True
    found = list(guard._context.incidents) if guard is not None else []
    if guard is not None:
        guard.close()
    return {
        "weights": [local_part(p.detach()).clone() for p in model.parameters()],
        "halted": halted,
        "armed": guard is not None and guard.armed,
        "told": [(i.step, i.verdict.kind, i.decision and i.decision.action) for i in found],
        "reasons": [i.decision.reason for i in found if i.decision is not None],
    }


def _step(
    guard: Guard | None, loop: str, model: nn.Module, optimizer: Any, data: Tensor, no_update: bool
) -> None:
    def loss_of(given: Tensor) -> Tensor:
        loss: Tensor = model(given).square().mean()
        return loss

    if guard is not None and loop == "step":
        guard.step(loss_of, data)
        return
    optimizer.zero_grad()
    loss_of(data).backward()
    if not no_update:
        optimizer.step()


def without(engine: str, loop: str, harm: str) -> dict[str, Any]:
    """Never damaged; under `watch` the step that met the damage is lost."""
    lost = BAD_STEP
    if harm == "slot":
        lost += 1  # a bad moment shows in the weights after the update
    return train(engine, "bare", "none", leave_out=lost if loop == "watch" else -1)


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    roles: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
        "guarded": train,
        "never": without,
    }
    for name in names:
        for role, play in roles.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = play(*name.split("-"))
            torch.save(found, out / f"{name}.{role}.{dist.get_rank()}.pt")
            dist.barrier()
    # torch keeps meshes, and through them the group, in caches of DTensor (process_group.py)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
