"""One replica of torchft, guarded; what came of it into a file.

python torchft_worker.py OUT replica lighthouse-address trouble
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn

from stepguard import Guard, GuardConfig

WIDTH, STEPS, BAD_STEP = 4, 6, 3
WAIT = timedelta(seconds=30)


class Replica:
    """Model, optimizer and manager, as torchft's documentation builds them."""

    def __init__(self, number: int, lighthouse: str) -> None:
        torch.manual_seed(number)
        self.net = nn.Linear(WIDTH, 1)
        inner = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=WAIT),
            min_replica_size=2,
            load_state_dict=self._load,
            state_dict=self._state,
            use_async_quorum=False,
            timeout=WAIT,
            quorum_timeout=WAIT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{number}",
        )
        self.model = torchft.DistributedDataParallel(self.manager, self.net)
        self.inner = inner
        self.optimizer = torchft.Optimizer(self.manager, inner)

    def _state(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "optimizer": self.inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])


def main(out: Path, number: int, lighthouse: str, trouble: str) -> None:
    torch.set_num_threads(1)
    replica = Replica(number, lighthouse)
    config = GuardConfig(terminal="quiet")
    guard = Guard(replica.model, replica.optimizer, config=config)
    waiting = [number == 1]

    def loss_of(inputs: Tensor) -> Tensor:
        loss: Tensor = replica.model(inputs).square().mean()
        if trouble == "loss" and here:
            # a term without a gradient: the other replica sees nothing of it
            loss = loss + torch.nan
        return loss

    committed: list[bool] = []
    for _ in range(3 * STEPS):
        step = replica.manager.current_step()
        if step >= STEPS:
            break
        here = waiting[0] and step == BAD_STEP
        source = torch.Generator().manual_seed(100 * step + number)
        inputs = torch.randn(3, WIDTH, generator=source)
        if trouble == "input" and here:
            inputs[1, 0] = torch.nan
        waiting[0] = waiting[0] and not here
        committed.append(guard.step(loss_of, inputs).committed)
    guard.close()
    found = {
        "weights": [p.detach().clone() for p in replica.net.parameters()],
        "armed": guard.armed,
        "incidents": [(i.step, i.verdict.kind, i.decision) for i in guard._context.incidents],
        "committed": committed,
        "step": replica.manager.current_step(),
    }
    torch.save(found, out / f"{trouble}.{number}.pt")
    replica.manager.shutdown(wait=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
