"""Know state that is sharded over ranks: each keeps its own part, none can run the model alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from stepguard.state.batch import Step
from stepguard.state.files import SHARE_OF_FREE, free_memory
from stepguard.tensors.names import FSDP2, is_distributed, sharding_class
from stepguard.tensors.torch_private import TorchDispatchMode, finished_work, fsdp2_groups

# --- Know state that is sharded over ranks: each keeps its own part, none can run the model
# alone.


def show_shards(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 modules hold their shards.

    After an evaluation the root still holds whole parameters, which the optimizer does not know.
    Asks no other rank, and the next forward pass gathers them again.
    """
    for root in modules:
        for module in root.modules():
            if _is_fsdp2(module):
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


# --- Hold all parameters of an FSDP2 model on one rank for a while, so that it can run a step
# alone.


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
                return f"{name} is computed collectively by several ranks (tensor parallel)"
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
            # DeepSpeed's stage 3 keeps the whole size beside a parameter that is empty
            elements = getattr(parameter, "ds_numel", parameter.numel())
            needed += 2 * elements * parameter.element_size()
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


# --- Answer collectives of the user's code with this rank's own values while it replays alone.


if torch.distributed.is_available():
    # Its functions take the process group as a default argument when they are imported, and keep
    # it for ever. Wrapping a model imports them after the group was made; then the group's threads
    # outlive Python, and one that frees a tensor aborts a run that was already over.
    import torch.distributed.nn.functional

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
KEEP = frozenset(
    {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier", "monitored_barrier_"}
)
"""In-place collectives that leave a group of one as it is."""
FUNCTIONAL = frozenset(
    {"all_reduce", "all_reduce_", "broadcast", "broadcast_", "wait_tensor", "_wrap_tensor_autograd"}
)


class CollectiveInReplayError(RuntimeError):
    """The user's code needs the other ranks, so this step cannot be replayed alone."""


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode of replays that are not traced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            return alone(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def distributed() -> bool:
    """Are there other ranks?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the collective would give if this rank were the only one."""
    name = func._schema.name.partition("::")[2]
    if func.namespace != "c10d" and name in FUNCTIONAL:
        return args[0]
    if func.namespace != "c10d" or name not in (*KEEP, "allgather_", "_allgather_base_"):
        raise CollectiveInReplayError(f"{func} needs the other ranks")
    if name == "allgather_":
        for slots, own in zip(args[0], args[1], strict=True):
            for slot in slots:
                slot.copy_(own)
    elif name == "_allgather_base_":
        args[0].view(-1, *args[1].shape).copy_(args[1])
    work = finished_work()
    if len(func._schema.returns) == 1:
        return work
    return (args[0], work)
