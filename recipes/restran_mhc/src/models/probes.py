"""Five probes in every hyper-connection: what was bad, in the order in which it became so.

A probe only looks. It never replaces a value: returning the input instead of a NaN leaves
BatchNorm's statistics poisoned and hides the cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

PLACES = (
    "INPUT (pooled)",
    "READ-OUT (h_in)",
    "SUBLAYER OUTPUT (h_out)",
    "WRITE-IN + RESIDUAL",
    "FINAL OUTPUT",
)
REMEMBERED = 100
"""Forward passes whose routing scores are kept."""


class NonFiniteForward(ValueError):  # noqa: N818 (the report names what happened)
    """NaN or Inf in the model's predictions, with what the probes saw on the way."""

    REASON = "NaN detected in model predictions - forward pass corrupted"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One probe that saw a bad tensor."""

    title: str
    lines: tuple[str, ...]
    origin: bool = False
    """The first of its forward pass."""

    def __str__(self) -> str:
        head = f"{'🔴' if self.origin else '🟡'} NaN/Inf {self.title}:"
        return "\n".join([head, *(f"   {line}" for line in self.lines)])


@dataclass(slots=True)
class Probes:
    """What one step's first bad forward pass showed, and how large the routing scores have been.

    A guard that replays the step runs the model again; only the first bad pass since `clear` is
    kept.
    """

    on: bool = True
    sightings: list[Sighting] = field(default_factory=list)
    ranges: dict[str, deque[float]] = field(default_factory=dict)
    """Largest routing score of each module, newest last."""
    _pass: int = 0
    _bad_pass: int = 0

    def clear(self) -> None:
        self.sightings.clear()

    def begin(self) -> None:
        """A forward pass begins."""
        self._pass += 1

    def look(
        self, module: str, place: int, tensor: Tensor, label: str, **facts: Tensor | str
    ) -> None:
        """Note a tensor of a hyper-connection if it is not finite, with its statistics and those of
        `facts`.
        """
        if not self.on or bool(torch.isfinite(tensor.detach()).all()):
            return
        lines = [f"Module: {module}", f"Shape: {list(tensor.shape)}"]
        lines += [
            f"{name}: {value if isinstance(value, str) else summary(value)}"
            for name, value in facts.items()
        ]
        self._note(f"in mHC {PLACES[place]}", (*lines, *statistics(tensor, label)))

    def predictions(self, tensor: Tensor) -> None:
        """The model's own output."""
        if not self.on or bool(torch.isfinite(tensor.detach()).all()):
            return
        lines = (f"Pred shape: {tensor.shape}", *statistics(tensor, "Pred"))
        self._note(
            "detected in MODEL PREDICTIONS",
            (*lines, "This indicates NaN originated in forward pass"),
        )

    def _note(self, title: str, lines: tuple[str, ...]) -> None:
        if not self.sightings:
            self._bad_pass = self._pass
        if self._bad_pass == self._pass:
            self.sightings.append(Sighting(title, lines, origin=not self.sightings))

    def follow(self, module: str, scores: Tensor) -> None:
        """Remember how large the routing scores are."""
        if self.on:
            largest = float(scores.detach().abs().max())
            self.ranges.setdefault(module, deque(maxlen=REMEMBERED)).append(largest)

    def largest(self) -> float:
        """The largest routing score of the newest forward pass; 0 where there are none."""
        return max((seen[-1] for seen in self.ranges.values()), default=0.0)

    def story(self) -> Iterator[str]:
        """The sightings, origin first, then how the routing scores came there."""
        yield from map(str, self.sightings)
        for module, seen in self.ranges.items():
            yield (
                f"   routing scores of {module}: "
                f"{' '.join(f'{value:.3g}' for value in list(seen)[-40::8])}"
            )


def statistics(tensor: Tensor, label: str) -> tuple[str, ...]:
    """NaN and Inf counts, and the range of the rest."""
    plain = tensor.detach().float()
    rest = plain[torch.isfinite(plain)]
    span = (
        f"min={rest.min():.6g}, max={rest.max():.6g}" if rest.numel() else "nothing finite is left"
    )
    return (
        f"NaN count: {int(torch.isnan(plain).sum())}",
        f"Inf count: {int(torch.isinf(plain).sum())}",
        f"{label} stats (non-nan): {span}",
    )


def summary(tensor: Tensor) -> str:
    plain = tensor.detach().float()
    if plain.numel() == 1:
        return f"{plain.item():.6g}"
    return f"min={plain.min():.6f}, max={plain.max():.6f}, mean={plain.mean():.6f}"
