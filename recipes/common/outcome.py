"""What one mode of a recipe ended with, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from stepguard import Incident

Mode = Literal["healthy", "unguarded", "seedfix", "guarded"]
MODES: tuple[Mode, ...] = ("healthy", "unguarded", "seedfix", "guarded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One line of the table."""

    mode: Mode
    losses: tuple[float, ...]
    """The true loss of every step, NaN included."""
    first_bad: int | None
    """The first step whose loss, gradient norm or parameters were not finite, counted by the recipe itself."""
    metric: float
    bad_parameters: int = 0
    bad_buffers: int = 0
    tensors: int = 0
    incidents: tuple[Incident, ...] = ()
    seconds: float = 0.0
    also: Mapping[str, float] = field(default_factory=dict)
    """Other numbers for the table, by name."""

    @property
    def detected(self) -> int | None:
        return self.incidents[0].step if self.incidents else None

    @property
    def cause(self) -> str:
        """The code of the best finding on the first incident."""
        found = self.incidents[0].findings if self.incidents else ()
        return found[0].code if found else ""

    @property
    def actions(self) -> str:
        counts: dict[str, int] = {}
        for incident in self.incidents:
            if incident.decision is not None:
                counts[incident.decision.action] = counts.get(incident.decision.action, 0) + 1
        return ", ".join(f"{action} {number}" for action, number in counts.items())


@dataclass(slots=True)
class Watchman:
    """Counts bad steps by the recipe's own eyes, so that the guard is not its own judge."""

    losses: list[float] = field(default_factory=list)
    first_bad: int | None = None

    def step(self, loss: float, norm: float = 0.0, parameters: Iterable[Tensor] = ()) -> bool:
        """Record a step; True when it was bad."""
        step = len(self.losses)
        self.losses.append(loss)
        bad = not (math.isfinite(loss) and math.isfinite(norm)) or bad_tensors(parameters) > 0
        if bad and self.first_bad is None:
            self.first_bad = step
        return bad


def bad_tensors(tensors: Iterable[Tensor]) -> int:
    """How many of them hold a NaN or an Inf."""
    return sum(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors)


def damage(model: nn.Module) -> tuple[int, int, int]:
    """Bad parameters, bad buffers, and how many tensors there are."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    return bad_tensors(parameters), bad_tensors(buffers), len(parameters) + len(buffers)
