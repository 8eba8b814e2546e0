"""Tell tensors and modules of which every rank holds a part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

FSDP1 = "FullyShardedDataParallel"
SHARDING_MODULES = (FSDP1, "FSDPModule")
"""FSDP1 wraps a module; `fully_shard` (FSDP2) makes its class a subclass of FSDPModule."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where the part of a tensor that one rank holds lies in the whole of it."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    first: bool = True
    """No rank before this one holds the same part: this one writes it to disk."""

    @property
    def elements(self) -> int:
        return math.prod(self.size)


def whole_part(shape: tuple[int, ...]) -> Part:
    """The part that is all of it."""
    return Part(whole=tuple(shape), offset=(0,) * len(shape), size=tuple(shape))


def part_of(tensor: Any) -> Part:
    """Which part of a DTensor this rank holds. Asks no other rank."""
    # the protocol by which torch.distributed.checkpoint asks a DTensor for its part
    (chunk,) = tensor.__create_chunk_list__()
    place = tensor.device_mesh.get_coordinate() or []
    first = True
    for number, placement in zip(place, tensor.placements, strict=False):
        # along this dimension of the mesh all ranks hold the same
        if placement.is_replicate() and number:
            first = False
    return Part(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes), first)


def is_distributed(tensor: Tensor) -> bool:
    """True for a DTensor. Only these have placements; importing their class is slow."""
    return hasattr(tensor, "placements")


def sharding_class(module: nn.Module) -> str:
    """Name the class that shards this very module; empty for an ordinary one.

    While a module of FSDP2 computes, its parameters are whole, plain tensors: only its class tells.
    """
    for kind in type(module).__mro__:
        if kind.__name__ in SHARDING_MODULES:
            return kind.__name__
    return ""


def wrapped_by_fsdp1(module: nn.Module) -> bool:
    """True for a module whose own wrapper is FSDP1, which clips through its root only."""
    return sharding_class(module) == FSDP1
