"""Two ranks, bad rows on one of them, and a second start in the same folder; what each saw goes
into a file a rank.

torchrun --standalone --nproc-per-node 2 ledger_worker.py OUT
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from process_group import gloo
from stepguard import Guard, GuardConfig, Snapshots
from stepguard.journal import read_run
from stepguard.ledger import read_ledger

BATCH, ROWS = 4, 64
BAD = (17, 19, 25)
"""All on rank 1: ranks take every second row."""


def data() -> tuple[TensorDataset, DataLoader[Any]]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    x[list(BAD)] = math.nan
    rows = TensorDataset(x, torch.arange(ROWS))
    return rows, DataLoader(rows, BATCH, sampler=DistributedSampler(rows, shuffle=False))


def attempt(out: Path, *, again: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=out / "run", terminal="quiet", snapshots=Snapshots(probation=2))
    guard = Guard(model, optimizer, loader=data()[1], config=config)
    seen: list[list[int]] = []
    with guard:
        if again:
            guard.restore()
        for x, rows in guard.loader:
            seen.append(rows.tolist())
            guard.step(lambda batch: model(batch[0]).pow(2).mean(), (x, rows))
            if guard.steps == 1 and not again:
                assert guard.save() is not None
        incidents = [
            incident.origin.rows if incident.origin else None for incident in guard.incidents
        ]
    return {"seen": seen, "incidents": incidents, "armed": guard.armed}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with gloo():
        rank = dist.get_rank()
        first, second = attempt(out, again=False), attempt(out, again=True)
        entries = [
            [e.batch, e.indices, e.innocent, e.left_out] for e in read_ledger(out / "run", rank)[0]
        ]
        said = [
            n["summary"]
            for n in read_run(out / "run", rank).notes
            if "skipping batch" in str(n.get("summary"))
        ]
        told = {"first": first, "second": second, "entries": entries, "said": said}
        (out / f"told.{rank}.json").write_text(json.dumps(told), encoding="utf-8")
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
