"""Answer collectives of the user's code with this rank's own values while it replays alone.

Other ranks do not take part in a replay, so a real collective would hang.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepguard.tensors.torch_private import TorchDispatchMode, finished_work

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
    if func.namespace != "c10d":
        return _functional(func, name, args)
    if name in KEEP:
        return _with_work(args[0], func)
    if name == "allgather_":
        _fill(args[0], args[1])
        return _with_work(args[0], func)
    if name == "_allgather_base_":
        args[0].view(-1, *args[1].shape).copy_(args[1])
        return _with_work(args[0], func)
    raise CollectiveInReplayError(f"{func} needs the other ranks")


def _functional(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    if name in FUNCTIONAL:
        return args[0]
    raise CollectiveInReplayError(f"{func} needs the other ranks")


def _fill(outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
    for slots, own in zip(outputs, inputs, strict=True):
        for slot in slots:
            slot.copy_(own)


def _with_work(value: Any, func: Any) -> Any:
    work = finished_work()
    if len(func._schema.returns) == 1:
        return work
    return value, work
