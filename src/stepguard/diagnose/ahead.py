"""What the rules on coming trouble share: a figure of the looks, its limit, and its forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from stepguard.diagnose.crossing import CLEAR, Clarity, Crossing, Points, crossing
from stepguard.records import Reading
from stepguard.records.forecast import Forecast
from stepguard.records.look import Look

LARGEST_POWER = 1023.0
"""What Python's numbers can hold."""
LEARNED = 0.1
"""Share by which the loss falls during a trend in a run that learns."""
LEARNS = 0.01
"""Share by which it falls from the third quarter of the trend to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of one look, as a binary logarithm."""

    place: str
    """Module or parameter."""
    value: float | None
    limit: float
    """As a binary logarithm."""
    near: bool
    """Close enough to its limit to be worth a forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A quantity of the looks that must not reach its limit."""

    quantity: str
    figures: Callable[[Look], Iterable[Figure]]
    rising: bool = True
    doubted: Callable[[Forecast, Sequence[Look]], bool] = lambda forecast, looks: False
    """True where another figure explains the trend harmlessly."""


def soonest(looks: Sequence[Look], trend: Trend, clarity: Clarity = CLEAR) -> Forecast | None:
    """The forecast for the place that meets its limit first."""
    if len(looks) < clarity.fewest:
        return None
    # asked of the newest look first: in a healthy run nothing is near, and no history is gathered
    newest = {figure.place: figure for figure in trend.figures(looks[-1]) if figure.near}
    if not newest:
        return None
    found = []
    for place, points in _series(looks, trend, newest).items():
        limit = newest[place].limit
        ahead = crossing(points, limit, rising=trend.rising, clarity=clarity)
        if ahead is not None:
            forecast = forecast_of(trend.quantity, place, points, limit, ahead)
            if not trend.doubted(forecast, looks):
                found.append(forecast)
    return min(found, key=lambda one: one.step, default=None)


def _series(
    looks: Sequence[Look], trend: Trend, places: Iterable[str]
) -> dict[str, list[tuple[int, float]]]:
    """Place -> its figure in every look."""
    series: dict[str, list[tuple[int, float]]] = {place: [] for place in places}
    for look in looks:
        for figure in trend.figures(look):
            if figure.place in series and figure.value is not None:
                series[figure.place].append((look.step, figure.value))
    return series


def forecast_of(
    quantity: str, place: str, points: Points, limit: float, ahead: Crossing
) -> Forecast:
    """A crossing of logarithms as a forecast of numbers."""
    return Forecast(
        quantity=quantity,
        place=place,
        since=ahead.since,
        first=2.0 ** dict(points)[ahead.since],
        now=points[-1][0],
        value=2.0 ** points[-1][1],
        limit=2.0 ** min(limit, LARGEST_POWER),
        step=ahead.step,
        earliest=ahead.earliest,
        latest=ahead.latest,
    )


def is_learning(recent: Sequence[Reading], since: int) -> bool:
    """The loss fell clearly since this step, and still falls: what grows may grow towards what is
    to be learned, and end there.
    """
    losses = []
    for reading in recent:
        if reading.step >= since and reading.loss is not None and math.isfinite(reading.loss):
            losses.append(reading.loss)
    quarter = len(losses) // 4
    # a loss that is negative may fall for ever
    if quarter == 0 or min(losses) <= 0.0:
        return False
    now = median(losses[-quarter:])
    before = median(losses[-2 * quarter : -quarter])
    return now < (1.0 - LEARNED) * median(losses[:quarter]) and now < (1.0 - LEARNS) * before


def log2(value: float | None) -> float | None:
    """For figures that grow by factors; None where there is no logarithm."""
    if value is None or value <= 0.0 or not math.isfinite(value):
        return None
    return math.log2(value)
