"""Know state that is sharded over ranks: one rank can neither keep it nor run the model alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from stepguard.tensors.sharding import is_distributed, sharding_class

WAY_OUT = (
    "snapshots, guard.save() and rewinding are off for this run; save with "
    "torch.distributed.checkpoint "
    "(torch.distributed.checkpoint.state_dict.get_state_dict gathers model and optimizer)."
)


def why_sharded(modules: Iterable[nn.Module]) -> str:
    """Say what is sharded and what to use instead; empty if every rank has all of the state."""
    what = sharded_part(modules)
    if what:
        return f"{what}, every rank holds a part of it: {WAY_OUT}"
    return ""


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
