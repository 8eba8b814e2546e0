"""Dotted names of parameters, buffers and modules below several root modules.

A root has a prefix: "" for the model, `criterion` for a further module that was handed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

# --- Dotted names of parameters, buffers and modules below several root modules.


Roots = Mapping[str, nn.Module]


def dotted(prefix: str, name: str) -> str:
    """Join two parts of a name, either of which may be empty."""
    if prefix and name:
        return f"{prefix}.{name}"
    return prefix or name


def named_parameters(roots: Roots) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter below every root."""
    for prefix, root in roots.items():
        for name, parameter in root.named_parameters():
            yield dotted(prefix, name), parameter


def named_buffers(roots: Roots) -> Iterator[tuple[str, Tensor]]:
    """Yield every buffer below every root."""
    for prefix, root in roots.items():
        for name, buffer in root.named_buffers():
            yield dotted(prefix, name), buffer


def named_modules(roots: Roots) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below every root, the roots themselves included."""
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            yield dotted(prefix, name), module


def names_by_id(named: Iterable[tuple[str, object]]) -> dict[int, str]:
    """Map the identity of each object to its name. Tensors cannot be keys: == compares elements."""
    return {id(item): name for name, item in named}


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """List what the optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_parameter_ids(optimizer: Optimizer) -> set[int]:
    """Identities of what the optimizer updates."""
    return {id(parameter) for parameter in optimizer_parameters(optimizer)}


def parameter_names(roots: Roots, optimizer: Optimizer) -> list[tuple[Tensor, str]]:
    """Name each parameter once; `group0[1]` for those that only the optimizer knows."""
    names: dict[int, tuple[Tensor, str]] = {}
    for name, parameter in named_parameters(roots):
        names.setdefault(id(parameter), (parameter, name))
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), (parameter, f"group{number}[{position}]"))
    return list(names.values())


# --- Tell tensors and modules of which every rank holds a part.


FSDP1 = "FullyShardedDataParallel"
FSDP2 = "FSDPModule"
SHARDING_MODULES = (FSDP1, FSDP2)
"""FSDP1 wraps a module; `fully_shard` (FSDP2) makes its class a subclass of FSDPModule."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where the part of a tensor that one rank holds lies in the whole of it."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    first: bool = True
    """No rank before this one holds the same part: this one writes it to disk."""

    @property
    def elements(self) -> int:
        return math.prod(self.size)


def whole_part(shape: tuple[int, ...]) -> TensorPart:
    """The part that is all of it."""
    return TensorPart(whole=tuple(shape), offset=(0,) * len(shape), size=tuple(shape))


def part_of(tensor: Any) -> TensorPart:
    """Which part of a DTensor this rank holds. Asks no other rank."""
    # the protocol by which torch.distributed.checkpoint asks a DTensor for its part
    (chunk,) = tensor.__create_chunk_list__()
    place = tensor.device_mesh.get_coordinate() or []
    first = True
    for number, placement in zip(place, tensor.placements, strict=False):
        # along this dimension of the mesh all ranks hold the same
        if placement.is_replicate() and number:
            first = False
    return TensorPart(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes), first)


def sharded_like(like: Any, part: Tensor) -> Tensor:
    """A DTensor of which this rank holds `part`, divided as another one is."""
    # imported late: only where there is a DTensor has it been imported already
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def is_distributed(tensor: Tensor) -> bool:
    """True for a DTensor. Only these have placements; importing their class is slow."""
    return hasattr(tensor, "placements")


def shard_of(tensor: Tensor) -> str:
    """Say which part of a tensor this rank holds: the same words mean the same part.

    Empty for a tensor that is not spread over ranks. Ranks along a dimension of the mesh that
    replicates hold the same part.
    """
    if not is_distributed(tensor):
        return ""
    given: Any = tensor
    mesh = given.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return "nothing"
    parts = []
    for dimension, placement in enumerate(given.placements):
        where = "all" if placement.is_replicate() else str(place[dimension])
        parts.append(f"{placement}={where}")
    return f"{tuple(mesh.shape)} {' '.join(parts)}"


def sharding_class(module: nn.Module) -> str:
    """Name the class that shards this very module; empty for an ordinary one.

    While a module of FSDP2 computes, its parameters are whole, plain tensors: only its class tells.
    """
    for kind in type(module).__mro__:
        if kind.__name__ in SHARDING_MODULES:
            return kind.__name__
    return ""


def wrapped_by_fsdp1(module: nn.Module) -> bool:
    """True for a module whose own wrapper is FSDP1, which clips through its root only."""
    return sharding_class(module) == FSDP1


def parts_of(tensor: Any, *, partial: bool = False) -> int | None:
    """How many different parts of a DTensor the ranks hold; None where a part is only a summand.

    `partial`: of a norm, which is a summand where its gradients are parts.
    """
    sizes: list[int] = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial() and not partial:
            return None
        if not placement.is_replicate():
            sizes.append(tensor.device_mesh.size(axis))
    return math.prod(sizes)


def fsdp1_parts(roots: Iterable[nn.Module]) -> dict[int, int]:
    """By the id of each parameter of FSDP1: over how many ranks its parts are spread."""
    found: dict[int, int] = {}
    for root in roots:
        # From the outside in: a wrapper inside has the last word on its own parameters.
        for module in root.modules():
            if wrapped_by_fsdp1(module):
                parts = _ranks_of_fsdp1(module)
                found.update({id(parameter): parts for parameter in module.parameters()})
    return found


def _ranks_of_fsdp1(module: Any) -> int:
    if module.sharding_strategy.name == "NO_SHARD":
        return 1
    ranks: int = module.process_group.size()
    return ranks


# --- Put a wrapper in the place of an attribute, and put the original back.


Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original and returns the wrapper."""


def wrap(undo: ExitStack, owner: Any, name: str, make: Make) -> None:
    """Wrap `owner.name`; closing `undo` puts it back, unless it was wrapped again since."""
    # The owner's own attribute: None for a method that an instance or a class only inherits.
    before = vars(owner).get(name)
    ours = make(getattr(owner, name))
    setattr(owner, name, ours)

    def put_back() -> None:
        if vars(owner).get(name) is not ours:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    undo.callback(put_back)


@contextmanager
def swapped(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Make `owner.name` be `other` inside the block."""
    with ExitStack() as undo:
        wrap(undo, owner, name, lambda original: other)
        yield
