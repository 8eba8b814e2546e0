"""What the rules on coming trouble share: the series of a figure, and the sentence of a forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from stepguard.diagnose.crossing import Crossing, crossing
from stepguard.records.look import Look

Figures = Callable[[Look], Iterable[tuple[str, float | None]]]
"""Name of a thing, and its figure in this look."""


def soonest(
    looks: Sequence[Look], figures: Figures, limit: Callable[[str], float], *, rising: bool
) -> tuple[str, list[tuple[int, float]], Crossing] | None:
    """The thing whose figure meets its limit first, with its series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for look in looks:
        for name, value in figures(look):
            if value is not None and math.isfinite(value):
                series.setdefault(name, []).append((look.step, value))
    found = []
    for name, points in series.items():
        ahead = crossing(points, limit(name), rising=rising)
        if ahead is not None:
            found.append((name, points, ahead))
    return min(found, key=lambda one: one[2].step, default=None)


def when(ahead: Crossing) -> str:
    """`at about step 1200 (1100 to 1500)`."""
    return f"at about step {ahead.step} ({ahead.earliest} to {ahead.latest})"


def log2(value: float) -> float | None:
    """For figures that grow by factors; None where there is no logarithm."""
    if value <= 0.0 or not math.isfinite(value):
        return None
    return math.log2(value)
