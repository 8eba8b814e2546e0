"""Know state that is sharded over ranks: each keeps its own part, none can run the model alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from stepguard.tensors.sharding import FSDP2, is_distributed, sharding_class


def show_shards(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 modules hold their shards.

    After an evaluation the root still holds whole parameters, which the optimizer does not know.
    Asks no other rank, and the next forward pass gathers them again.
    """
    for root in modules:
        for module in root.modules():
            if sharding_class(module) == FSDP2:
                module.reshard()  # type: ignore[operator]


def sharded_part(modules: Iterable[nn.Module]) -> str:
    """Say which part of the model no rank holds whole; empty if every rank has all parameters.

    Where there is one, a forward pass needs all ranks: run by one of them alone it raises, or
    leaves wrong values in the memory that FSDP gathers parameters into.
    """
    for root in modules:
        for module in root.modules():
            kind = sharding_class(module)
            if kind:
                return f"the model is wrapped in {kind}"
        for name, parameter in root.named_parameters():
            if is_distributed(parameter):
                return f"parameter {name} is a DTensor"
    return ""
