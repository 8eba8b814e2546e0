"""Find the model, scheduler and scaler of an optimizer among the objects of the process."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

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


def variable_name(value: object) -> str | None:
    """The local variable that holds the object, in the innermost calling function with one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        users = not frame.f_globals.get("__name__", "").startswith(("stepguard.", "torch."))
        name = _local_name(frame, value) if users else None
        if name is not None and not name.startswith("_"):
            return name
        frame = frame.f_back
    return None


def _local_name(frame: FrameType, value: object) -> str | None:
    for name, held in list(frame.f_locals.items()):
        if held is value:
            return name
    return None


def scheduler_of(optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler that drives this optimizer; the outermost where schedulers are chained."""
    ours = [s for s in _living(LRScheduler) if getattr(s, "optimizer", None) is optimizer]
    nested: set[int] = set()
    for scheduler in ours:
        # SequentialLR and ChainedScheduler keep the schedulers inside them under this name.
        nested.update(map(id, getattr(scheduler, "_schedulers", ())))
    outer = [s for s in ours if id(s) not in nested]
    return outer[0] if len(outer) == 1 else None


def scaler_in_use() -> GradScaler | None:
    """The one enabled GradScaler of the process, if there is exactly one."""
    enabled = [s for s in _living(GradScaler) if s.is_enabled()]
    return enabled[0] if len(enabled) == 1 else None


def _living(kind: type[Any]) -> list[Any]:
    # type() and not isinstance: proxies answer isinstance with side effects.
    return [o for o in gc.get_objects() if issubclass(type(o), kind)]
