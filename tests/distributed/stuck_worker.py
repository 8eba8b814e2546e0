"""A rank that waits in a collective for one that never comes, and is told to end.

stuck_worker.py FOLDER, as two ranks of forked.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stepguard import Guard, GuardConfig

AFTER = 1.0
"""Seconds until the signal: the main thread waits in the collective by then, or is about to."""


def main(out: Path, rank: int) -> None:
    store = dist.FileStore(str(out / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if rank:
        signal.pause()  # until the end of the first rank ends this one
    config = GuardConfig(run_dir=out / "run", terminal="quiet")
    with Guard(model, optimizer, config=config):
        threading.Timer(AFTER, os.kill, (os.getpid(), signal.SIGTERM)).start()
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
