"""Tell tensors and modules of which every rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

FSDP1 = "FullyShardedDataParallel"
FSDP2 = "FSDPModule"
SHARDING_MODULES = (FSDP1, FSDP2)
"""FSDP1 wraps a module; `fully_shard` (FSDP2) makes its class a subclass of FSDPModule."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where the part of a tensor that one rank holds lies in the whole of it."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    first: bool = True
    """No rank before this one holds the same part: this one writes it to disk."""

    @property
    def elements(self) -> int:
        return math.prod(self.size)


def whole_part(shape: tuple[int, ...]) -> TensorPart:
    """The part that is all of it."""
    return TensorPart(whole=tuple(shape), offset=(0,) * len(shape), size=tuple(shape))


def part_of(tensor: Any) -> TensorPart:
    """Which part of a DTensor this rank holds. Asks no other rank."""
    # the protocol by which torch.distributed.checkpoint asks a DTensor for its part
    (chunk,) = tensor.__create_chunk_list__()
    place = tensor.device_mesh.get_coordinate() or []
    first = True
    for number, placement in zip(place, tensor.placements, strict=False):
        # along this dimension of the mesh all ranks hold the same
        if placement.is_replicate() and number:
            first = False
    return TensorPart(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes), first)


def sharded_like(like: Any, part: Tensor) -> Tensor:
    """A DTensor of which this rank holds `part`, divided as another one is."""
    # imported late: only where there is a DTensor has it been imported already
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


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


def parts_of(tensor: Any, *, partial: bool = False) -> int | None:
    """How many different parts of a DTensor the ranks hold; None where a part is only a summand.

    `partial`: of a norm, which is a summand where its gradients are parts.
    """
    sizes: list[int] = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial() and not partial:
            return None
        if not placement.is_replicate():
            sizes.append(tensor.device_mesh.size(axis))
    return math.prod(sizes)


def fsdp1_parts(roots: Iterable[nn.Module]) -> dict[int, int]:
    """By the id of each parameter of FSDP1: over how many ranks its parts are spread."""
    found: dict[int, int] = {}
    for root in roots:
        # From the outside in: a wrapper inside has the last word on its own parameters.
        for module in root.modules():
            if wrapped_by_fsdp1(module):
                parts = _ranks_of_fsdp1(module)
                found.update({id(parameter): parts for parameter in module.parameters()})
    return found


def _ranks_of_fsdp1(module: Any) -> int:
    if module.sharding_strategy.name == "NO_SHARD":
        return 1
    ranks: int = module.process_group.size()
    return ranks
