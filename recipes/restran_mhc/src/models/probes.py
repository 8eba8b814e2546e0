"""Five probes in every hyper-connection: what was bad, in the order in which it became so.

A probe only looks. It never replaces a value: returning the input instead of a NaN leaves BatchNorm's statistics poisoned and
hides the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

PLACES = ("INPUT (pooled)", "READ-OUT (h_in)", "SUBLAYER OUTPUT (h_out)", "WRITE-IN + RESIDUAL", "FINAL OUTPUT")


class NonFiniteForward(ValueError):
    """NaN or Inf in the model's predictions, with what the probes saw on the way."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One probe that saw a bad tensor."""

    module: str
    place: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        head = "🔴" if self.place == PLACES[0] else "🟡"
        return "\n".join([f"{head} NaN/Inf in mHC {self.place}: {self.module}", *(f"   {line}" for line in self.lines)])


@dataclass(slots=True)
class Probes:
    """Sightings of one forward pass, and the range of the routing scores over the run."""

    on: bool = True
    sightings: list[Sighting] = field(default_factory=list)
    ranges: dict[str, list[float]] = field(default_factory=dict)
    """Largest routing score of each module, the last hundred passes."""

    def begin(self) -> None:
        self.sightings.clear()

    def look(self, module: str, place: int, tensor: Tensor, **facts: Tensor) -> None:
        """Note the tensor if it is not finite, with its statistics and those of `facts`."""
        if not self.on or bool(torch.isfinite(tensor.detach()).all()):
            return
        lines = [f"Shape: {list(tensor.shape)}", *statistics(tensor)]
        lines += [f"{name} stats: {summary(value)}" for name, value in facts.items()]
        self.sightings.append(Sighting(module, PLACES[place], tuple(lines)))

    def follow(self, module: str, scores: Tensor) -> None:
        """Remember how large the routing scores are."""
        if self.on:
            history = self.ranges.setdefault(module, [])
            history.append(float(scores.detach().abs().max()))
            del history[:-100]


def statistics(tensor: Tensor) -> list[str]:
    """NaN and Inf counts, and the range of the rest."""
    plain = tensor.detach().float()
    rest = plain[torch.isfinite(plain)]
    span = f"min={rest.min():.6g}, max={rest.max():.6g}" if rest.numel() else "nothing finite is left"
    return [
        f"NaN count: {int(torch.isnan(plain).sum())}",
        f"Inf count: {int(torch.isinf(plain).sum())}",
        f"stats (non-nan): {span}",
    ]


def summary(tensor: Tensor) -> str:
    plain = tensor.detach().float()
    if plain.numel() == 1:
        return f"{plain.item():.6g}"
    return f"min={plain.min():.6f}, max={plain.max():.6f}, mean={plain.mean():.6f}"
