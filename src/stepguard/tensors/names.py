"""Dotted names of parameters, buffers and modules below several root modules.

A root has a prefix: "" for the model, `criterion` for a further module that was handed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

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
