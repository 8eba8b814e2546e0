"""Run on two gloo ranks, one of which gets a NaN row: OUT frameworks, an accelerate script and a
Trainer; OUT lightning, every scenario of Lightning and Fabric. Each rank writes what it ended with.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

from integrations.lightning_scenes import QUIET, Net, batches, everything, fit, trainer, with_nan
from integrations.trainers import bad_tensors, logged, numbers, quiet, regression
from integrations.trainers import trainer as make_trainer
from process_group import part
from stepguard import Incident
from stepguard.integrations import fabric as fabric_integration
from stepguard.integrations.accelerate import SaveRefused, guard
from stepguard.integrations.lightning import GuardCallback
from stepguard.integrations.transformers import guard as guard_trainer


def places(incidents: tuple[Incident, ...]) -> list[dict[str, Any]]:
    found = [(incident.step, incident.origin) for incident in incidents]
    return [
        {
            "step": step,
            "rank": o.rank,
            "micro": o.micro_batch,
            "samples": o.samples,
            "tensor": o.tensor,
        }
        for step, o in found
        if o is not None
    ]


def weights(model: torch.nn.Module) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def run_script(folder: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rank = accelerator.process_index
    rows = numbers(32, nan_at=21 if rank == 1 else None)
    refused = False
    with guard(accelerator, quiet()) as watching:
        for i in range(0, 32, 4):
            batch = {key: torch.stack([row[key] for row in rows[i : i + 4]]) for key in rows[0]}
            with accelerator.accumulate(model):
                accelerator.backward(watching.loss(lambda given: model(**given)["loss"], batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        state = next(iter(optimizer.optimizer.state.values()))
        if rank == 1:
            state["exp_avg"].fill_(math.nan)  # only this rank's optimizer is spoiled
        try:
            accelerator.save_state(folder)
        except SaveRefused:
            refused = True
        state["exp_avg"].fill_(0.0)
        write(
            "accelerate",
            rank,
            model,
            watching,
            refused=refused,
            schedule=schedule.scheduler.last_epoch,
        )


def run_trainer(folder: str) -> None:
    made = make_trainer(
        Path(folder), regression(), numbers(48, nan_at=21), save_strategy="steps", save_steps=1
    )
    with guard_trainer(made, quiet()) as watching:
        made.train()
    nan_lines = [math.isnan(loss) for loss in logged(made, "loss")]
    write(
        "trainer",
        made.args.process_index,
        made.model,
        watching,
        schedule=made.lr_scheduler.last_epoch,
        nan=nan_lines,
    )


def write(name: str, rank: int, model: torch.nn.Module, watching: Any, **more: Any) -> None:
    common = {"part": name, "rank": rank, "bad": bad_tensors(model), "weights": weights(model)}
    told = json.dumps({**common, "incidents": places(watching.incidents), **more})
    Path(sys.argv[1], f"{name}-{rank}.json").write_text(told)


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


def run_lightning(out: Path) -> None:
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


if __name__ == "__main__":
    folder, what = sys.argv[1:]
    if what == "lightning":
        run_lightning(Path(folder))
    else:
        run_script(f"{folder}/state")
        run_trainer(f"{folder}/out")
    part()
