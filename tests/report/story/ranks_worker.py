"""Two ranks of DDP with one folder: a NaN in the data of rank 1 at step 5.

torchrun --standalone --nproc-per-node 2 ranks_worker.py OUT
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from process_group import gloo
from stepguard import Guard, GuardConfig


def train(folder: Path) -> None:
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


if __name__ == "__main__":
    with gloo():
        train(Path(sys.argv[1]) / "run")
