"""State that is spread over ranks cannot be kept by one of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

SHARDING_MODULES = ("FullyShardedDataParallel", "FullyShardedDataParallelV2")
SHARDING_OPTIMIZERS = ("ZeroRedundancyOptimizer",)
WAY_OUT = (
    "snapshots, guard.save() and rewinding are off for this run; save with "
    "torch.distributed.checkpoint "
    "(torch.distributed.checkpoint.state_dict.get_state_dict gathers model and optimizer)."
)


def why_sharded(modules: Iterable[nn.Module], optimizer: Optimizer) -> str:
    """What is sharded and what to use instead, in words; empty when every rank has all of it."""
    for root in modules:
        wrapper = next((m for m in root.modules() if type(m).__name__ in SHARDING_MODULES), None)
        if wrapper is not None:
            return (
                f"the model is wrapped in {type(wrapper).__name__}, every rank holds a part of "
                f"it: {WAY_OUT}"
            )
        name = next((n for n, p in root.named_parameters() if hasattr(p, "placements")), None)
        if name is not None:
            return f"parameter {name} is a DTensor, every rank holds a part of it: {WAY_OUT}"
    if type(optimizer).__name__ in SHARDING_OPTIMIZERS:
        return f"{type(optimizer).__name__} keeps a part of its state on every rank: {WAY_OUT}"
    return ""
