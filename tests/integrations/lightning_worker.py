"""Run by torchrun: every scenario on two gloo ranks; each rank writes what it ended with."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

from integrations.lightning_scenes import QUIET, Net, batches, everything, fit, trainer, with_nan
from process_group import part
from stepguard.integrations import fabric as fabric_integration
from stepguard.integrations.lightning import GuardCallback


class Used(Net):
    """Every parameter takes part, as DDP wants it."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__(fused=fused)
        self.extra = nn.Identity()  # type: ignore[assignment]


def mine(rank: int, fault: bool) -> list[Any]:
    """Each rank has its own half of the batches; only rank 1 gets the bad one."""
    data = batches(16)[rank::2]
    return with_nan(data) if fault and rank == 1 else data


def run(
    out: Path, rank: int, *, guarded: bool, fault: bool, fused: bool = False, accumulate: int = 1
) -> dict[str, Any]:
    callback, module = GuardCallback(QUIET), Used(fused=fused)
    made = trainer(
        out,
        *([callback] if guarded else []),
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    torch.manual_seed(1)
    fit(made, module, mine(rank, fault))
    state = everything(made, module)
    callback.close()
    return {"state": state, "incidents": [told(incident) for incident in callback.incidents]}


def told(incident: Any) -> Any:
    origin = incident.origin
    return (
        incident.step,
        incident.reading.bad_ranks,
        origin.rank,
        origin.tensor,
        origin.samples,
        origin.reproduced,
    )


def run_fabric(fault: bool, *, guarded: bool = True) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    data = mine(fabric.global_rank, fault)

    def loss(batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    guard = fabric_integration.guard(fabric, model, optimizer, config=QUIET) if guarded else None
    for batch in data:
        optimizer.zero_grad()
        fabric.backward(guard.loss(loss, batch) if guard is not None else loss(batch))
        optimizer.step()
    incidents = [told(incident) for incident in guard.incidents] if guard is not None else []
    if guard is not None:
        guard.close()
    return {"state": {"model": dict(net.state_dict())}, "incidents": incidents}


def main(out: Path) -> None:
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    found = {
        "bare": run(out / "bare", rank, guarded=False, fault=False),
        "healthy": run(out / "healthy", rank, guarded=True, fault=False),
        "bare accumulated": run(out / "bare2", rank, guarded=False, fault=False, accumulate=2),
        "healthy accumulated": run(out / "healthy2", rank, guarded=True, fault=False, accumulate=2),
        "damaged": run(out / "damaged", rank, guarded=False, fault=True),
        "bad": run(out / "bad", rank, guarded=True, fault=True),
        "bad fused": run(out / "fused", rank, guarded=True, fault=True, fused=True),
        "bad accumulated": run(out / "bad2", rank, guarded=True, fault=True, accumulate=2),
        "fabric bare": run_fabric(False, guarded=False),
        "fabric healthy": run_fabric(False),
        "fabric bad": run_fabric(True),
    }
    torch.save(found, out / f"rank{rank}.pt")
    part()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
