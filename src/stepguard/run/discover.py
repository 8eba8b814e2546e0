"""Finding what belongs to an optimizer in a script that was never told about stepguard."""

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
    """What an optimizer trains: the model, and further modules by name where the parameters lie in
    several.
    """

    model: nn.Module
    modules: dict[str, nn.Module] = field(default_factory=dict)


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Identities of what the optimizer updates."""
    return frozenset(optimizer_parameter_ids(optimizer))


def share(module: nn.Module, parameters: frozenset[int]) -> int:
    """How many of the parameters lie in the module."""
    try:
        return sum(id(p) in parameters for p in module.parameters())
    except AttributeError:  # its __init__ has not run yet
        return 0


def trained_by(optimizer: Optimizer, called: nn.Module | None = None) -> Trained:
    """The outermost modules that hold the parameters. `called`, the one being called, goes before
    what contains it.
    """
    ours = parameters_of(optimizer)
    found = [_called_first(module, called, ours) for module in _outermost(ours)]
    if not found:
        return Trained(
            called if called is not None and share(called, ours) else LooseParameters(optimizer)
        )
    found.sort(key=lambda module: (share(module, ours), module is called), reverse=True)
    rest = {}
    for index, module in enumerate(found[1:], start=1):
        name = variable_name(module) or f"{type(module).__name__.lower()}{index}"
        rest[name if name not in rest else f"{name}{index}"] = module
    return Trained(found[0], rest)


def _outermost(parameters: frozenset[int]) -> list[nn.Module]:
    modules = [
        m for m in _living(nn.Module) if share(m, parameters) and not isinstance(m, LooseParameters)
    ]
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if id(m) not in inner]


def _called_first(
    module: nn.Module, called: nn.Module | None, parameters: frozenset[int]
) -> nn.Module:
    """A container nobody calls (a trainer, an average of weights) is worse than the model in it."""
    if called is None or called is module or not any(m is called for m in module.modules()):
        return module
    return called if share(called, parameters) == share(module, parameters) else module


def variable_name(value: object) -> str | None:
    """What the innermost of the calling functions that knows the object calls it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("stepguard.", "torch.")):
            name = next((n for n, known in list(frame.f_locals.items()) if known is value), None)
            if name is not None and not name.startswith("_"):
                return name
        frame = frame.f_back
    return None


def scheduler_of(optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler that drives this optimizer; the outermost where schedulers are chained."""
    ours = [s for s in _living(LRScheduler) if getattr(s, "optimizer", None) is optimizer]
    nested = {id(s) for outer in ours for s in getattr(outer, "_schedulers", ())}
    outer = [s for s in ours if id(s) not in nested]
    return outer[0] if len(outer) == 1 else None


def scaler_in_use() -> GradScaler | None:
    """The one enabled GradScaler of the process, if there is exactly one."""
    enabled = [s for s in _living(GradScaler) if s.is_enabled()]
    return enabled[0] if len(enabled) == 1 else None


def _living(kind: type[Any]) -> list[Any]:
    # type() and not isinstance: proxies answer isinstance with side effects
    return [o for o in gc.get_objects() if issubclass(type(o), kind)]
