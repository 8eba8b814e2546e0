"""The processes of a run: started by torchrun, or one alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many this process is, and where it computes."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def told(self, say: Callable[[], Any]) -> Any:
        """What the first rank says, on every rank."""
        said = [say() if self.first else None]
        if self.world > 1:
            dist.broadcast_object_list(said, src=0)
        return said[0]


def join(backend: str, world_size: int | None) -> Ranks:
    """Meet the processes that torchrun started. `auto` is gloo where there is no accelerator."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size is not None and world_size != world:
        raise SystemExit(f"training.world_size={world_size}, but {world} processes were started.")
    device = torch.device("cpu")
    if backend != "gloo" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    if world > 1:
        dist.init_process_group(
            dist.get_default_backend_for_device(device) if backend == "auto" else backend
        )
    return Ranks(int(os.environ.get("RANK", "0")), world, device)


def equal_weights(module: nn.Module, ranks: Ranks) -> bool:
    """Does every process hold the same weights, bit for bit? All of them ask."""
    digest = hashlib.sha256()
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    found: list[Any] = [None] * ranks.world
    dist.all_gather_object(found, digest.hexdigest())
    return len(set(found)) == 1


def leave(ranks: Ranks) -> None:
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()
