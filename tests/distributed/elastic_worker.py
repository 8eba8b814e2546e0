"""Ranks under torchrun --max-restarts: one is killed, or a policy stops them; then they go on.

torchrun --standalone --max-restarts 3 --nproc-per-node 2 elastic_worker.py OUT scenario
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from settings_of import config_of
from stepguard import Guard, Policy
from stepguard._errors import StoreError

STEPS, KILLED_AT, BAD = 14, 9, (6, 7)
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join() -> None:
    """A store of its own for every attempt: gloo would find the addresses of dead ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=60))
    prefixed = dist.PrefixStore(f"attempt-{ATTEMPT}", store)
    dist.init_process_group(
        "gloo", store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def build(sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.2), nn.Linear(7, 2))
    torch.manual_seed(dist.get_rank() + 7)
    if not sharded:
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def batch(step: int, scenario: str) -> Tensor:
    seed = 2 * step + dist.get_rank()
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    if scenario == "halt" and step in BAD and dist.get_rank() == 1:
        data[0, 0] = torch.nan
    return data


def held(model: nn.Module) -> list[Tensor]:
    parts: list[Any] = [p.detach() for p in model.parameters()]
    return [(p.to_local() if hasattr(p, "to_local") else p).clone() for p in parts]


def run(out: Path, scenario: str, folder: str, *, kills: bool) -> None:
    rank = dist.get_rank()
    model = build(sharded=scenario == "kill")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Policy(max_consecutive=1) if scenario == "halt" else Policy()
    settings: dict[str, Any] = {"terminal": "quiet", "snapshot_every": 2, "probation": 2}
    config = config_of(
        **settings, run_dir=out / folder, policy=policy, checkpoint_every=2, locate=False
    )
    with Guard(model, optimizer, config=config) as guard:
        try:
            done = guard.restore()
        except StoreError:
            done = 0
        (out / f"{folder}.{ATTEMPT}.{rank}").write_text(str(done))
        for step in range(done, STEPS):
            if kills and step == KILLED_AT and ATTEMPT == 0 and rank == 1:
                guard._saving.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            guard.step(lambda x: model(x).square().mean(), batch(step, scenario))
        torch.save({"model": held(model), "done": done}, out / f"{folder}.{rank}.pt")


def main(out: Path, scenario: str) -> None:
    torch.set_num_threads(1)
    join()
    run(out, scenario, scenario, kills=scenario == "kill")
    if scenario == "kill":
        dist.barrier()
        run(out, scenario, "never", kills=False)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
