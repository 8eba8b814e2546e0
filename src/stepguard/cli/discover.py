"""Finding what belongs to an optimizer in a script that was never told about stepguard."""

from __future__ import annotations

import gc
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class LooseParameters(nn.Module):
    """Stands in for a model when the parameters belong to no module."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.loose = nn.ParameterList([p for p in params if isinstance(p, nn.Parameter)])


def model_of(optimizer: Optimizer) -> nn.Module:
    """The outermost module that holds the most of the optimizer's parameters."""
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [m for m in _living(nn.Module) if any(id(p) in ours for p in m.parameters())]
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    outermost = [m for m in modules if id(m) not in inner]
    if not outermost:
        return LooseParameters(optimizer)
    model: nn.Module = max(outermost, key=lambda m: sum(id(p) in ours for p in m.parameters()))
    return model


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
