"""Know state that is sharded over ranks: each keeps its own part, none can run the model alone."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.state.batch import Step, is_record, key_from_json, tree_from_json
from stepguard.state.files import free_memory
from stepguard.tensors.names import FSDP2, is_distributed, sharded_like, sharding_class
from stepguard.tensors.torch_private import TorchDispatchMode, finished_work, fsdp2_groups
from stepguard.tensors.values import dense_values, is_lazy, local_part

# --- Put saved values into live ones: the same tensors and containers where they fit.


class Refill:
    """Puts one saved state back. A tensor that was kept once and referred to twice is made once."""

    def __init__(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._parameters = parameters
        self._made: dict[str, Tensor] = {}

    def value(self, live: Any, structure: Any, like: Tensor | None = None) -> Any:
        """Return the saved value; the live object itself, refilled, if it can hold it.

        `like`: the parameter that the value belongs to; a tensor that is made goes where that is.
        """
        if "tensor" in structure:
            return self._tensor(live, structure, like)
        if "mapping" in structure and isinstance(live, MutableMapping):
            return self._mapping(live, structure, like)
        if type(live) in (list, tuple, deque):
            return self._sequence(live, structure, like)
        return self._record(live, structure, like)

    def _tensor(self, live: Any, structure: Any, like: Tensor | None) -> Tensor:
        name = structure["tensor"]
        kept = self._tensors[name]
        if isinstance(live, Tensor):
            own = local_part(live.detach())
            if (own.shape, own.dtype) == (kept.shape, kept.dtype):
                own.copy_(kept)
                return live
        if name not in self._made:
            value = tree_from_json(structure, self._tensors)
            self._made[name] = value if like is None else _placed_like(like, value)
        return self._made[name]

    def _mapping(self, live: MutableMapping[Any, Any], structure: Any, like: Tensor | None) -> Any:
        saved: dict[Any, Any] = {}
        for key, item in structure["mapping"]:
            saved[key_from_json(key, self._parameters)] = item
        for key in [key for key in live if key not in saved]:
            del live[key]
        for key, item in saved.items():
            live[key] = self.value(live.get(key), item, like)
        return live

    def _sequence(self, live: Any, structure: Any, like: Tensor | None) -> Any:
        if type(live) is list and "list" in structure:
            live[:] = self._items(live, structure["list"], like)
            return live
        if type(live) is tuple and "tuple" in structure:
            return tuple(self._items(live, structure["tuple"], like))
        if type(live) is deque and "deque" in structure and live.maxlen == structure["most"]:
            items = self._items(live, structure["deque"], like)
            live.clear()
            live.extend(items)
            return live
        return self._new(structure)

    def _record(self, live: Any, structure: Any, like: Tensor | None) -> Any:
        if "named" in structure and isinstance(live, tuple) and hasattr(live, "_replace"):
            return live._replace(**self._fields(live, structure["named"], like))
        if "fields" in structure and is_record(live):
            return dataclasses.replace(live, **self._fields(live, structure["fields"], like))
        return self._new(structure)

    def _new(self, structure: Any) -> Any:
        return tree_from_json(structure, self._tensors, self._parameters)

    def _items(self, live: Any, saved: list[Any], like: Tensor | None) -> list[Any]:
        old = list(live)[: len(saved)]
        old += [None] * (len(saved) - len(old))
        return [self.value(mine, item, like) for mine, item in zip(old, saved, strict=True)]

    def _fields(self, live: Any, saved: list[Any], like: Tensor | None) -> dict[str, Any]:
        return {name: self.value(getattr(live, name, None), item, like) for name, item in saved}


def _placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    # Counters stay on the host, as torch's own optimizers keep them.
    if not value.dim():
        return value
    placed = value.to(parameter.device)
    if is_distributed(parameter) and value.shape == local_part(parameter.detach()).shape:
        return sharded_like(parameter, placed)
    return placed


def in_containers_of(live: Any, value: Any) -> Any:
    """Return the value in the containers of the live one: a Counter stays a Counter."""
    if isinstance(live, Mapping) and isinstance(value, Mapping):
        items = {key: in_containers_of(live.get(key), item) for key, item in value.items()}
        return _mapping_like(live, items)
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        return value.to(live.device)
    if not isinstance(live, list | tuple) or not isinstance(value, list | tuple):
        return value
    if len(live) != len(value):
        return value
    return type(value)(map(in_containers_of, live, value))


def _mapping_like(live: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(live) is dict or not isinstance(live, MutableMapping):
        return items
    # A copy keeps what the class adds, such as the factory of a defaultdict.
    twin = copy.copy(live)
    twin.clear()
    twin.update(items)
    return twin


# --- Know state that is sharded over ranks: each keeps its own part, none can run the model
# alone.


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


# --- Hold all parameters of an FSDP2 model on one rank for a while, so that it can run a step
# alone.


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


# --- A number for the content of a tensor, taken on its own device: equal bits, equal number.


PIECE = 1 << 20
"""Elements that are weighed at a time, so that the memory this takes is bounded."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def tensor_fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return shape, dtype and a weighted sum of the bits of each tensor."""
    sums = {name: _weighed(tensor) for name, tensor in tensors.items()}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        found[name] = f"{tensor.dtype}{list(tensor.shape)}:{int(sums[name])}"
    return found


@torch.no_grad()
def checksums(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return a number for each tensor, on its device and not waited for; None where there is none.

    Of a tensor that is spread over ranks it is the number of this rank's part.
    """
    found: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or is_lazy(tensor) or tensor.is_meta or tensor.is_nested:
            found.append(None)
        else:
            found.append(_weighed(dense_values(tensor)))
    return found


def read_checksums(sums: Iterable[Tensor | None]) -> list[int]:
    """Wait for the numbers; 0 where there is none."""
    waiting = list(sums)
    there = [number for number in waiting if number is not None]
    if not there:
        return [0] * len(waiting)
    device = there[0].device
    numbers = iter(torch.stack([number.to(device) for number in there]).tolist())
    return [0 if number is None else int(next(numbers)) for number in waiting]


def combined(numbers: Iterable[int]) -> int:
    """One number for several, 0 only where all of them are."""
    given = list(numbers)
    if not any(given):
        return 0
    content = json.dumps(given).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") or 1


def fact_fingerprint(value: Any) -> str:
    """Return a digest of a JSON value."""
    content = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _weighed(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits, each times an odd number of its place; int64 wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(_bits(tensor), PIECE):
        places = torch.arange(piece.numel(), device=piece.device, dtype=torch.int64)
        # a plain sum would not see two elements that changed places
        weights = (places * 0x2545F4914F6CDD1D) | 1
        total = total * 31 + (piece.to(torch.int64) * weights).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])
