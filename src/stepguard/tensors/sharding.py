"""Tell tensors and modules of which every rank holds a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

FSDP1 = "FullyShardedDataParallel"
SHARDING_MODULES = (FSDP1, "FSDPModule")
"""FSDP1 wraps a module; `fully_shard` (FSDP2) makes its class a subclass of FSDPModule."""


def is_distributed(tensor: Tensor) -> bool:
    """True for a DTensor. Only these have placements; importing their class is slow."""
    return hasattr(tensor, "placements")


def shard_of(tensor: Tensor) -> str:
    """Say which part of a tensor this rank holds: the same words mean the same part.

    Empty for a tensor that is not spread over ranks. Ranks along a dimension of the mesh that
    replicates hold the same part.
    """
    if not is_distributed(tensor):
        return ""
    given: Any = tensor
    mesh = given.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return "nothing"
    parts = []
    for dimension, placement in enumerate(given.placements):
        where = "all" if placement.is_replicate() else str(place[dimension])
        parts.append(f"{placement}={where}")
    return f"{tuple(mesh.shape)} {' '.join(parts)}"


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
