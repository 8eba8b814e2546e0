"""Find the model, scheduler and scaler of an optimizer among the objects of the process."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stepguard.locate.source import variable_name
from stepguard.tensors.names import optimizer_parameter_ids, optimizer_parameters


class LooseParameters(nn.Module):
    """Stands in for a model when the parameters belong to no module."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        params = optimizer_parameters(optimizer)
        self.loose = nn.ParameterList([p for p in params if isinstance(p, nn.Parameter)])


@dataclass(slots=True)
class Trained:
    """What an optimizer trains: the model, and further modules by name where it has several."""

    model: nn.Module
    modules: dict[str, nn.Module] = field(default_factory=dict)


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Identities of what the optimizer updates."""
    return frozenset(optimizer_parameter_ids(optimizer))


def share(module: nn.Module, parameters: frozenset[int]) -> int:
    """How many of the parameters lie in the module."""
    try:
        return sum(id(p) in parameters for p in module.parameters())
    except AttributeError:
        # Found by the garbage collector before its __init__ has run.
        return 0


def trained_by(optimizer: Optimizer, called: nn.Module | None = None) -> Trained:
    """The outermost modules that hold the parameters; `called` is preferred to what contains it."""
    ours = parameters_of(optimizer)
    found = [_called_first(module, called, ours) for module in _outermost(ours)]
    if not found and called is not None and share(called, ours):
        return Trained(called)
    if not found:
        return Trained(LooseParameters(optimizer))
    found.sort(key=lambda module: (share(module, ours), module is called), reverse=True)
    rest = {}
    for index, module in enumerate(found[1:], start=1):
        name = variable_name(module) or f"{type(module).__name__.lower()}{index}"
        if name in rest:
            name = f"{name}{index}"
        rest[name] = module
    return Trained(found[0], rest)


def _outermost(parameters: frozenset[int]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    inner: set[int] = set()
    for module in _living(nn.Module):
        if isinstance(module, LooseParameters) or not share(module, parameters):
            continue
        modules.append(module)
        # Module.modules() begins with the module itself.
        inner.update(map(id, list(module.modules())[1:]))
    return [module for module in modules if id(module) not in inner]


def _called_first(
    module: nn.Module, called: nn.Module | None, parameters: frozenset[int]
) -> nn.Module:
    """The called module in place of a container (a trainer, an average of weights) around it."""
    if called is None or not any(inner is called for inner in module.modules()):
        return module
    complete = share(called, parameters) == share(module, parameters)
    return called if complete else module


def scaler_in_use() -> GradScaler | None:
    """The one enabled GradScaler of the process, if there is exactly one."""
    enabled = [s for s in _living(GradScaler) if s.is_enabled()]
    return enabled[0] if len(enabled) == 1 else None


def _living(kind: type[Any]) -> list[Any]:
    # type() and not isinstance: proxies answer isinstance with side effects.
    return [o for o in gc.get_objects() if issubclass(type(o), kind)]
