"""Two ranks under DDP, one of which stalls in a forward pass.

hung_worker.py FOLDER, as two ranks of forked.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stepguard import Guard, GuardConfig
from stepguard import guard as guard_module
from stepguard.records import Sink

STALLS_AT = 2


class Telling(Sink):
    """Ends the process with what was said about the other rank."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if fields.get("kind") == "hang":
            (self._out / "said").write_text(fields["summary"])
            os._exit(7)


def stall() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the end of the first rank ends this one
    signal.pause()


def main(out: Path, rank: int) -> None:
    store = dist.FileStore(str(out / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard_module.HANGS_AFTER = 1 / 60  # after a second
    config = GuardConfig(terminal="quiet", sinks=(Telling(out),))
    guard = Guard(model, optimizer, config=config)

    def loss_fn(batch: Tensor) -> Tensor:
        if rank and guard.steps == STALLS_AT:
            stall()
        loss: Tensor = model(batch).square().mean()
        return loss

    for _ in range(STALLS_AT + 1):
        guard.step(loss_fn, torch.ones(2, 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
