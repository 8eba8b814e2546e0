"""Find the DistributedDataParallel around a model: the loss goes through it in any case."""

from __future__ import annotations

import gc

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.sentinel.rank_agreement import world


def data_parallel_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper of this process that holds `model`; None if it is or has none.

    Its parameters are reduced in the backward pass, and only a replay that knows the wrapper can
    keep it from waiting for the other ranks.
    """
    if world()[1] == 1 or isinstance(model, DistributedDataParallel):
        return None
    # type() and not isinstance: proxies answer isinstance with side effects
    found: list[DistributedDataParallel] = [
        o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)
    ]
    for wrapper in found:
        if wrapper.__dict__.get("_modules", {}).get("module") is model:
            return wrapper
    return None
