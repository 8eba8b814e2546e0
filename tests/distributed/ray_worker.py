"""Ray Train with two workers, guarded: one has a bad batch.

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
from torch import nn

from stepguard import Guard, GuardConfig

WIDTH, STEPS, BAD_STEP = 4, 6, 3


def train(settings: dict[str, Any]) -> None:
    """What a worker runs: the loop of docs/distributed.md."""
    out = Path(settings["out"])
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Guard(
        model, optimizer, config=GuardConfig(run_dir=out / "run", terminal="quiet")
    ) as guard:
        for step in range(STEPS):
            source = torch.Generator().manual_seed(100 * step + rank)
            inputs = torch.randn(3, WIDTH, generator=source)
            if rank == 1 and step == BAD_STEP:
                inputs[2, 0] = torch.nan
            guard.step(lambda x: model(x).square().mean(), inputs)
            if step == BAD_STEP + 1:
                guard.save()
        found = {
            "weights": [p.detach().clone() for p in model.parameters()],
            "incidents": [(i.step, i.origin.rank, i.origin.samples) for i in guard.incidents],
            "armed": guard.armed,
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
