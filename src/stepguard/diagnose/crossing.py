"""Where a series of numbers runs to: the step at which it meets a limit, with an interval.

Quiet by construction: a trend counts if nearly every pair of points agrees on its direction, its
second half is not slower than half of its first, and the limit is near in terms of what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FEWEST_POINTS = 5
CLEAR = 0.8
"""Kendall's tau from which on a direction is clear: nine of ten pairs agree."""
FAREST = 1.0
"""How far ahead a forecast may reach, in lengths of what was seen."""
SLOWING = 0.5
"""A second half that is slower than this share of the first is levelling off."""
LIKELY_SLOPES = (0.1, 0.9)

Points = Sequence[tuple[int, float]]
"""Step and value, oldest first. Values that grow by factors are given as logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a series meets its limit if it goes on as it did."""

    step: int
    earliest: int
    latest: int
    slope: float
    """Change of the value in one step."""


def crossing(points: Points, limit: float, *, rising: bool) -> Crossing | None:
    """The step at which the series meets `limit`; None where no trend is clear or it is far."""
    known = [(step, value) for step, value in points if math.isfinite(value)]
    if len(known) < FEWEST_POINTS:
        return None
    sign = 1.0 if rising else -1.0
    known = [(step, sign * value) for step, value in known]
    room = sign * limit - known[-1][1]
    slopes = pair_slopes(known)
    slope = median(slopes) if slopes else 0.0
    if room <= 0.0 or slope <= 0.0 or agreement(known) < CLEAR or levelling_off(known):
        return None
    now = known[-1][0]
    ahead = room / slope
    if ahead > FAREST * (now - known[0][0]):
        return None
    ordered = sorted(slopes)
    low, high = (ordered[int(share * (len(ordered) - 1))] for share in LIKELY_SLOPES)
    return Crossing(
        step=now + math.ceil(ahead),
        earliest=now + math.ceil(room / max(high, slope)),
        latest=now + math.ceil(room / low) if low > 0.0 else now + math.ceil(10 * ahead),
        slope=sign * slope,
    )


def pair_slopes(points: Points) -> list[float]:
    """Slope between every two points: their median does not follow single outliers (Theil-Sen)."""
    slopes = []
    for later in range(len(points)):
        for earlier in range(later):
            steps = points[later][0] - points[earlier][0]
            if steps > 0:
                slopes.append((points[later][1] - points[earlier][1]) / steps)
    return slopes


def agreement(points: Points) -> float:
    """Kendall's tau: 1 where every later value is the larger one."""
    slopes = pair_slopes(points)
    if not slopes:
        return 0.0
    up = sum(slope > 0 for slope in slopes)
    down = sum(slope < 0 for slope in slopes)
    return (up - down) / len(slopes)


def levelling_off(points: Points) -> bool:
    """The second half rises more slowly than the first."""
    middle = len(points) // 2
    first = _mean_slope(points[: middle + 1])
    second = _mean_slope(points[middle:])
    return second < SLOWING * first


def _mean_slope(points: Points) -> float:
    steps = points[-1][0] - points[0][0]
    if steps <= 0:
        return 0.0
    return (points[-1][1] - points[0][1]) / steps
