"""Where a series of numbers runs to: the step at which it meets a limit, with an interval.

Quiet by construction: a trend counts if nearly every pair of points agrees on its direction, its
second half is not slower than half of its first, and the limit is near in terms of what was seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOWS = (64, 32, 16, 8)
"""How many of the newest points are tried, the longest stretch first: the start of a run is often
another movement than its end."""
MOST_POINTS = 16
"""A longer stretch is thinned out: slopes of all pairs are taken."""
SLOWING = 0.5
"""A second half that is slower than this share of the first is levelling off."""
JUMP = 0.5
"""Share of the whole change between two neighbours that makes it a jump."""
LIKELY_SLOPES = (0.1, 0.9)
"""Shares of all pairs that are slower than the ends of the interval."""
FARTHEST_END = 10.0
"""An interval ends at this many times the distance at the latest."""

Points = Sequence[tuple[int, float]]
"""Step and value, oldest first. Values that grow by factors are given as logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clarity:
    """From where on a trend counts."""

    fewest: int = 5
    """Points."""
    agreement: float = 0.8
    """Kendall's tau: 0.8 is nine of ten pairs that agree."""
    farthest: float = 1.0
    """How far ahead a forecast may reach, in lengths of what was seen."""


CLEAR = Clarity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a series meets its limit if it goes on as it did."""

    step: int
    earliest: int
    latest: int
    slope: float
    """Change of the value in one step."""
    since: int
    """First step of the trend."""


def crossing(
    points: Points, limit: float, *, rising: bool, clarity: Clarity = CLEAR
) -> Crossing | None:
    """The step at which the series meets `limit`; None where no trend is clear or it is far."""
    sign = 1.0 if rising else -1.0
    known = [(step, sign * value) for step, value in points if math.isfinite(value)]
    for length in (*WINDOWS, clarity.fewest):
        if clarity.fewest <= length and clarity.fewest <= len(known):
            found = _in_window(known[-length:], sign * limit, clarity)
            if found is not None:
                return Crossing(
                    step=found.step,
                    earliest=found.earliest,
                    latest=found.latest,
                    slope=sign * found.slope,
                    since=found.since,
                )
    return None


def _in_window(known: Points, limit: float, clarity: Clarity) -> Crossing | None:
    began, first = known[0]
    now, newest = known[-1]
    room = limit - newest
    # asked first, since it is cheap and nearly always ends the matter
    if room <= 0.0 or room > 2.0 * clarity.farthest * (newest - first):
        return None
    known = thinned(known)
    slopes = pair_slopes(known)
    slope = median(slopes) if slopes else 0.0
    if slope <= 0.0 or agreement(known) < clarity.agreement:
        return None
    if levelling_off(known) or is_jump(known):
        return None
    ahead = room / slope
    if ahead > clarity.farthest * (now - began):
        return None
    slowest, fastest = likely_slopes(known, slopes)
    latest = FARTHEST_END * ahead
    if slowest > 0.0:
        latest = min(room / slowest, latest)
    return Crossing(
        step=now + math.ceil(ahead),
        earliest=now + math.ceil(room / fastest),
        latest=now + math.ceil(latest),
        slope=slope,
        since=began,
    )


def thinned(points: Points) -> Points:
    """Evenly spread points, the newest one among them."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points[::-stride][::-1]


def pair_slopes(points: Points) -> list[float]:
    """Slope between every two points: their median does not follow single outliers (Theil-Sen)."""
    slopes = []
    for later in range(len(points)):
        for earlier in range(later):
            steps = points[later][0] - points[earlier][0]
            if steps > 0:
                slopes.append((points[later][1] - points[earlier][1]) / steps)
    return slopes


def likely_slopes(points: Points, slopes: Sequence[float]) -> tuple[float, float]:
    """A slow and a fast slope: of single pairs, and of the newer half where the series bends."""
    ordered = sorted(slopes)
    slow = ordered[int(LIKELY_SLOPES[0] * (len(ordered) - 1))]
    fast = ordered[int(LIKELY_SLOPES[1] * (len(ordered) - 1))]
    newer = _mean_slope(points[len(points) // 2 :])
    return min(slow, newer), max(fast, newer)


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


def is_jump(points: Points) -> bool:
    """Nearly all of the change came at once, as where harder data begin."""
    changes = [after[1] - before[1] for before, after in itertools.pairwise(points)]
    return max(changes) > JUMP * (points[-1][1] - points[0][1])


def _mean_slope(points: Points) -> float:
    steps = points[-1][0] - points[0][0]
    if steps <= 0:
        return 0.0
    return (points[-1][1] - points[0][1]) / steps
