"""The ranks that share one model, as its wrapper tells: those of its process group or its mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.tensors.sharding import is_distributed, wrapped_by_fsdp1
from stepguard.tensors.torch_private import fsdp1_group, root_mesh


class Ranks(NamedTuple):
    """Some of the ranks of this run."""

    members: tuple[int, ...]
    """As the user counts them."""
    group: Any
    """Their process group; None where there is none yet."""


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the ranks that share this model; None if these are all, or if nothing tells."""
    found = _of_wrapper(model)
    if found is None or set(found.members) == set(range(dist.get_world_size())):
        return None
    return found


def _of_wrapper(model: Any) -> Ranks | None:
    if isinstance(model, DistributedDataParallel):
        return _of_group(model.process_group)
    group = fsdp1_group(model) if wrapped_by_fsdp1(model) else None
    if group is not None:
        return _of_group(group)
    for parameter in model.parameters():
        if is_distributed(parameter):
            return _of_mesh(parameter.device_mesh)
    return None


def _of_group(group: Any) -> Ranks:
    return Ranks(tuple(dist.get_process_group_ranks(group)), group)


def _of_mesh(mesh: Any) -> Ranks:
    """A mesh may be cut out of a larger one, whose other ranks hold other stages of the model."""
    whole = root_mesh(mesh)
    members = tuple(int(rank) for rank in whole.mesh.flatten())
    group = whole.get_group() if whole.ndim == 1 else None
    return Ranks(members, group)
