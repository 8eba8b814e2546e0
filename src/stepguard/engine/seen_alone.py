"""What one rank sees and the others do not: it has to reach them before anybody waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.drivers.optimizer_kinds import takes_found_inf
from stepguard.sentinel.risky_update import risky_update
from stepguard.sentinel.stored_tensors import extremes, largest


class SeenAlone:
    """Values of this rank for the reduction of a step. Never waits for the device."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first: dict[tuple[int, str], Tensor] = {}
        """On the device: what every buffer held before the run, by its place."""

    def start(self) -> None:
        """Before the first update: remember what buffers hold, where nobody asks the host."""
        context = self._context
        if context.agreement.mode != "spread" and not takes_found_inf(context.optimizer):
            return
        for root in context.roots.values():
            for module in root.modules():
                for key, buffer in module._buffers.items():
                    first = None
                    if buffer is not None:
                        first = extremes(context.buffers.remembered(buffer))
                    if first is not None:
                        self._first[id(module), key] = first

    def written_buffers(self) -> list[Tensor]:
        """Largest of each buffer that this step's forward wrote, 0 for one infinite on purpose."""
        ignored = self._context.ignored
        found: list[Tensor] = []
        # by place, not by tensor: a forward pass may put another tensor there
        for place, buffer in self._context.buffers.written_at():
            value = largest([buffer]) if id(buffer) not in ignored else None
            if value is None:
                continue
            first = self._first.get(place)
            if first is not None:
                # one that held inf or NaN before the first step is a sentinel, no trouble
                meant = ~torch.isfinite(first).all().to(value.device)
                value = torch.where(meant, torch.zeros_like(value), value)
            found.append(value)
        return found

    def trouble(self) -> Tensor | None:
        """NaN where this rank's learning rate is not finite, or where it has missed an update."""
        if all(map(math.isfinite, self._context.lr)) and not self._context.missed:
            return None
        return torch.tensor(math.nan)

    def risk(self, line: Tensor, least: Tensor | None) -> Tensor:
        """1 where the update of this rank could make NaN of finite gradients, else 0."""
        context = self._context
        if risky_update(context.optimizer, context.lr_ceiling):
            return torch.ones_like(line[0])
        if least is None:
            return torch.zeros_like(line[0])
        # only a custom optimizer has it taken: those divide by the norm of a gradient
        return least.detach().reshape(()).eq(0).to(line)
