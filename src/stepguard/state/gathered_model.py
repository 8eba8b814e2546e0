"""Hold all parameters of an FSDP2 model on one rank for a while, so that it can run a step alone.

Gathering is a collective that all ranks enter by one agreed plan. What runs inside is not:
gradients stay where they are made and nothing is sharded in between, so a run that raises half way,
or that takes a part of the batch, keeps no other rank waiting. Afterwards all is sharded as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from stepguard.state.host_memory import free_memory
from stepguard.state.step import Step
from stepguard.tensors.sharding import FSDP2, is_distributed, sharding_class
from stepguard.tensors.torch_private import fsdp2_groups

SHARE_OF_FREE = 0.5
"""Of the free memory that parameters and their gradients may take."""
SILENT = {
    "reduce_grads": False,
    "all_reduce_grads": False,
    "reshard_after_backward": False,
    "post_forward_mesh_info": None,
}
"""What a group of FSDP2 is set to while a rank runs alone: it exchanges nothing."""


def why_not_gathered(roots: Iterable[nn.Module]) -> str:
    """Say why no rank can hold all of the model; empty if one can, given the room."""
    roots = list(roots)
    for root in roots:
        for module in root.modules():
            if sharding_class(module) not in ("", FSDP2):
                return "FullyShardedDataParallel gathers parameters inside its forward only"
        for name, parameter in root.named_parameters():
            if is_distributed(parameter) and not _by_fsdp2_alone(parameter):
                return f"{name} is computed by several ranks together (tensor parallel)"
    tops = _tops(roots)
    if not tops:
        return "parameters are sharded over ranks"
    if not all(hasattr(top, "reset_iter_state") for top in tops):
        return "this version of torch cannot take FSDP2 back to the start of a step"
    return ""


def spreads_in_forward(roots: Iterable[nn.Module]) -> bool:
    """Do ranks exchange activations, so that the bad batch of one spoils the loss of others?"""
    for root in roots:
        for parameter in root.parameters():
            if is_distributed(parameter) and not _by_fsdp2_alone(parameter):
                return True
    return False


def has_room(roots: Iterable[nn.Module]) -> bool:
    """Is there memory on this rank for all parameters and their gradients?"""
    needed = 0
    device = torch.device("cpu")
    for root in roots:
        for parameter in root.parameters():
            device = parameter.device
            needed += 2 * parameter.numel() * parameter.element_size()
    free = free_memory()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type != "cpu":
        free = None
    return free is not None and needed <= SHARE_OF_FREE * free


@contextmanager
def gathered(step: Step, *, hold: bool) -> Iterator[None]:
    """Enter on all ranks at once. Ranks that `hold` have all parameters inside, others none."""
    roots = list(step.named_roots().values())
    modules: list[Any] = []
    for root in roots:
        modules += [module for module in root.modules() if _is_fsdp2(module)]
    with ExitStack() as stack:
        if hold:
            for top in _tops(roots):
                stack.callback(top.reset_iter_state)
        for module in modules:
            # Some ranks may still hold what an evaluation has gathered: start alike on all.
            module.reshard()
            module.unshard()
            if not hold:
                module.reshard()
        if hold:
            stack.enter_context(_exchanging_nothing(modules))
            step.gathered = True
            stack.callback(setattr, step, "gathered", False)
        yield


@contextmanager
def _exchanging_nothing(modules: Iterable[nn.Module]) -> Iterator[None]:
    before: list[tuple[Any, str, Any]] = []
    try:
        for module in modules:
            for group in fsdp2_groups(module):
                for name, value in SILENT.items():
                    before.append((group, name, getattr(group, name)))
                    setattr(group, name, value)
                for held in group.fsdp_params:
                    # Else FSDP2 takes the gradients away, to add them up in this dtype.
                    before.append((held, "reduce_dtype", held.reduce_dtype))
                    held.reduce_dtype = None
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _by_fsdp2_alone(parameter: Any) -> bool:
    """Is it sharded once, by FSDP2, with copies or without? Tensor parallelism adds placements."""
    *copies, last = parameter.placements
    return last.is_shard() and len(copies) < 2 and all(one.is_replicate() for one in copies)


def _is_fsdp2(module: nn.Module) -> bool:
    return sharding_class(module) == FSDP2


def _tops(roots: Iterable[nn.Module]) -> list[Any]:
    """The outermost modules of FSDP2, which its own state of a step belongs to."""
    found: list[Any] = []
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if _is_fsdp2(module):
            found.append(module)
        else:
            waiting.extend(module.children())
    return found
