"""What one mode of a recipe ended with, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """The first step whose loss, gradient norm or parameters were not finite, counted by the recipe
    itself.
    """
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


def first_bad(losses: Sequence[float], norms: Sequence[float]) -> int | None:
    """The first bad step by the recipe's own eyes, so that the guard is not its own judge."""
    finite = [
        math.isfinite(loss) and math.isfinite(norm)
        for loss, norm in zip(losses, norms, strict=True)
    ]
    return None if all(finite) else finite.index(False)


def outcome_of(
    mode: Mode,
    model: nn.Module,
    *,
    losses: Sequence[float],
    norms: Sequence[float],
    metric: float,
    incidents: tuple[Incident, ...] = (),
    seconds: float = 0.0,
) -> Outcome:
    """What a loop ended with that kept the loss and the gradient norm of every step."""
    parameters, buffers, tensors = damage(model)
    return Outcome(
        mode=mode,
        losses=tuple(losses),
        first_bad=first_bad(losses, norms),
        metric=metric,
        bad_parameters=parameters,
        bad_buffers=buffers,
        tensors=tensors,
        incidents=incidents,
        seconds=seconds,
    )


def bad_tensors(tensors: Iterable[Tensor]) -> int:
    """How many of them hold a NaN or an Inf."""
    return sum(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors)


def damage(model: nn.Module) -> tuple[int, int, int]:
    """Bad parameters, bad buffers, and how many tensors there are."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    return bad_tensors(parameters), bad_tensors(buffers), len(parameters) + len(buffers)
