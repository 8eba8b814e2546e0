"""Tell whether a step of DistributedDataParallel reduces its gradients over all ranks.

In local SGD ranks take steps of their own and average their weights now and then: what one rank's
gradients hold in such a step, no other rank learns.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def reduces_now(model: DistributedDataParallel) -> bool:
    """Asked before a backward pass: will it reduce gradients over all ranks of the model?"""
    if not model.require_forward_param_sync:
        # its forward ran under `no_sync`
        return False
    return not any(_stays_local(state, model) for _, state in model._comm_hooks)


def _stays_local(state: Any, model: DistributedDataParallel) -> bool:
    """True for the state of `post_localSGD_hook` once its steps are local to a subgroup."""
    start = getattr(state, "start_localSGD_iter", None)
    if start is None or state.iter < start:
        return False
    if not state.post_local_gradient_allreduce:
        return True
    if state.subgroup is None:
        # made by the first local step, of the ranks on one node
        return True
    return dist.get_world_size(state.subgroup) < dist.get_world_size(model.process_group)
