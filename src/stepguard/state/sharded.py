"""Refuse state that is sharded over ranks: one rank cannot keep it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

SHARDING_MODULES = ("FullyShardedDataParallel", "FullyShardedDataParallelV2")
SHARDING_OPTIMIZERS = ("ZeroRedundancyOptimizer",)
WAY_OUT = (
    "snapshots, guard.save() and rewinding are off for this run; save with "
    "torch.distributed.checkpoint (torch.distributed.checkpoint.state_dict.get_state_dict gathers model and optimizer)."
)


def why_sharded(modules: Iterable[nn.Module], optimizer: Optimizer) -> str:
    """Say what is sharded and what to use instead; empty if every rank has all of the state."""
    for root in modules:
        for module in root.modules():
            kind = type(module).__name__
            if kind in SHARDING_MODULES:
                return f"the model is wrapped in {kind}, every rank holds a part of it: {WAY_OUT}"
        for name, parameter in root.named_parameters():
            # Only DTensors have placements; importing their class is slow.
            if hasattr(parameter, "placements"):
                return f"parameter {name} is a DTensor, every rank holds a part of it: {WAY_OUT}"
    if type(optimizer).__name__ in SHARDING_OPTIMIZERS:
        return f"{type(optimizer).__name__} keeps a part of its state on every rank: {WAY_OUT}"
    return ""
