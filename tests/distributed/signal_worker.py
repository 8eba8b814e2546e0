"""Ranks that train until a signal ends them; what each was at goes into a file.

torchrun --standalone --nproc-per-node 2 signal_worker.py OUT engine loop
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stepguard
from stepguard import Guard, GuardConfig, Ranks

MOST = 200_000
"""Steps; the signal comes long before."""
READY = 5


def build(engine: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if engine == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def main(out: Path, engine: str, loop: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = build(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=out / "run", terminal="quiet", ranks=Ranks(timeout=360.0))
    guard = (stepguard.watch if loop == "watch" else Guard)(model, optimizer, config=config)

    def loss_of(x: Any) -> Any:
        return model(x).square().mean()

    code = 0
    try:
        for step in range(MOST):
            data = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            if loop == "watch":
                optimizer.zero_grad()
                loss_of(data).backward()
                optimizer.step()
            else:
                guard.step(loss_of, data)
            if step == READY:
                (out / f"ready.{rank}").write_text(str(os.getpid()))
    except SystemExit as ended:
        code = int(str(ended.code))
    except KeyboardInterrupt:
        code = 130
    (out / f"ended.{rank}").write_text(f"{guard.steps} {code}")
    # as in sharded_worker.py: a thread of gloo may outlive Python
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
