"""Count what ranks exchange: collectives and bytes that one rank puts in, by step.

exchange_worker.py OUT ranks ...: forks its ranks itself, so that torch is imported once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.parts.forked_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard import Guard, GuardConfig, Ranks

STEPS, BAD_STEP, BAD_RANK = 4, 2, 1
COUNTED = ("all_reduce", "all_gather", "broadcast")
KINDS = (("manual", 2), ("manual", 60), ("ddp", 2), ("ddp", 60))
"""How gradients are exchanged, and the number of layers."""


class Counting:
    """Stands before torch's collectives: every Python spelling ends in one of these three."""

    def __init__(self) -> None:
        self.calls = 0
        self.size = 0

    def install(self) -> None:
        for name in COUNTED:
            counted = self._counting(getattr(dist.distributed_c10d, name))
            # functions of torch call each other by the names of their own module
            setattr(dist.distributed_c10d, name, counted)
            setattr(dist, name, counted)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # all_gather puts in its second argument, the others their first
            given = next(one for one in reversed(args[:2]) if isinstance(one, Tensor))
            self.calls += 1
            self.size += given.numel() * given.element_size()
            return original(*args, **kwargs)

        return call

    def taken(self) -> list[int]:
        found = [self.calls, self.size]
        self.calls = 0
        self.size = 0
        return found


def count(wrap: str, layers: int, rank: int, folder: Path) -> list[list[int]]:
    """Collectives and bytes of every step; one of them is bad on one rank."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counting = Counting()
    counting.install()
    found: list[list[int]] = []
    config = GuardConfig(terminal="quiet", ranks=Ranks(timeout=50.0))
    warnings.simplefilter("ignore")
    guard = Guard(model, optimizer, config=config)
    for step in range(STEPS):
        inputs = torch.full((2, 2), float(step + rank))
        if step == BAD_STEP and rank == BAD_RANK:
            inputs[0, 0] = torch.nan
        guard.step(lambda batch: model(batch).square().mean(), inputs)
        found.append(counting.taken())
    assert len(guard._context.incidents) == 1
    assert guard.armed
    return found


def main(out: Path, sizes: list[int]) -> None:
    found: dict[str, Any] = {}
    for ranks in sizes:
        for wrap, layers in KINDS:
            ends = run_ranks(ranks, partial(count, wrap, layers), seconds=100.0)
            found[f"{wrap}-{layers}-{ranks}"] = ends
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
