"""Ray Train with two workers, guarded and bare: a bad batch, a damaged weight, a checkpoint.

python ray_worker.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import Tensor, nn

from stepguard import Guard, GuardConfig, Policy, Snapshots

WIDTH, STEPS, BAD_STEP, CLIP = 4, 8, 3, 0.1
NO_COPY = Policy(actions=("retry", "leave_out", "skip", "rewind", "stop"))
"""Else a damaged weight is healed from the other worker."""


def built() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(rank: int, step: int, trouble: str) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(3, WIDTH, generator=source)
    if trouble == "input" and rank == 1 and step == BAD_STEP:
        inputs[2, 0] = torch.nan
    return inputs


def bare(rank: int, left_out: int = -1) -> list[Tensor]:
    model, optimizer = built()
    for step in range(STEPS):
        if step == left_out:
            continue
        optimizer.zero_grad()
        model(batch(rank, step, "")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def guarded(rank: int, trouble: str, folder: Path) -> dict[str, Any]:
    """The loop of docs/distributed.md; saved before its end, restored where that was asked for."""
    model, optimizer = built()
    config = GuardConfig(
        run_dir=folder,
        terminal="quiet",
        clip_norm=CLIP,
        snapshots=Snapshots(every=1, probation=1),
        policy=NO_COPY,
    )
    with Guard(model, optimizer, config=config) as guard:
        first = guard.restore() if trouble == "restored" else 0
        for step in range(first, STEPS):
            if trouble == "weight" and rank == 1 and step == BAD_STEP:
                next(model.parameters()).data.fill_(torch.nan)
            guard.step(lambda x: model(x).square().mean(), batch(rank, step, trouble))
            if step == BAD_STEP + 1 and trouble != "restored":
                guard.save()
        told = [(i.step, i.decision.action, i.origin.rank) for i in guard.incidents]
        weights = [p.detach().clone() for p in model.parameters()]
        return {"weights": weights, "told": told, "armed": guard.armed, "first": first}


def train(settings: dict[str, Any]) -> None:
    """What a worker runs."""
    out = Path(settings["out"])
    rank = ray.train.get_context().get_world_rank()
    found: dict[str, Any] = {
        "bare": bare(rank),
        "without": bare(rank, BAD_STEP),
        "none": guarded(rank, "none", out / "none"),
        "input": guarded(rank, "input", out / "input"),
        "weight": guarded(rank, "weight", out / "weight"),
        "restored": guarded(rank, "restored", out / "none"),
    }
    torch.save(found, out / f"ray.{rank}.pt")


def main(out: Path) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": str(out)},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(out / "ray"), name="guarded"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
