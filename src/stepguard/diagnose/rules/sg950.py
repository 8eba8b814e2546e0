"""SG951 to SG956: what a healthy run is heading for, and when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from stepguard.diagnose.case import FORMATS, Case
from stepguard.diagnose.rule import Found, likely, rule
from stepguard.records import Reading
from stepguard.records.probes import Forecast, Look

Looks = Sequence[Look]


# --- Where a series of numbers runs to: the step at which it meets a limit, with an interval.


WINDOWS = (64, 32, 16, 8)
"""How many of the newest points are tried, the longest stretch first: the start of a run is often
another movement than its end."""
FEWEST = 5
"""Points that make a trend."""
HALF = 0.5
"""A second half that is slower than this share of the first is levelling off; this share of the
whole change between two neighbours is a jump."""
LIKELY_SLOPES = (0.1, 0.9)
"""Shares of all pairs that are slower than the ends of the interval."""

Points = Sequence[tuple[int, float]]
"""Step and value as a binary logarithm, oldest first."""


def crossing(
    points: Points,
    limit: float,
    quantity: str = "",
    place: str = "",
    *,
    rising: bool = True,
    fewest: int = FEWEST,
    farthest: float = 1.0,
) -> Forecast | None:
    """When a series of binary logarithms meets `limit` if it goes on as it did; None where no trend
    is clear or it is far. `farthest`: how far ahead, in lengths of what was seen.
    """
    sign = 1.0 if rising else -1.0
    known = [(step, sign * value) for step, value in points if math.isfinite(value)]
    for length in (*WINDOWS, fewest):
        window = known[-length:]
        found = None
        if fewest <= min(length, len(known)):
            found = _in_window(window, sign * limit, farthest)
        if found is not None:
            step, earliest, latest = found
            return Forecast(
                quantity=quantity,
                place=place,
                since=window[0][0],
                first=2.0 ** (sign * window[0][1]),
                now=window[-1][0],
                value=2.0 ** (sign * window[-1][1]),
                limit=2.0 ** min(limit, 1023.0),  # what Python's numbers can hold
                step=step,
                earliest=earliest,
                latest=latest,
            )
    return None


def _in_window(known: Points, limit: float, farthest: float) -> tuple[int, int, int] | None:
    """The step at which a series that rises meets its limit, the earliest and the latest one."""
    began, first = known[0]
    now, newest = known[-1]
    room = limit - newest
    # asked first, since it is cheap and nearly always ends the matter
    if room <= 0.0 or room > 2.0 * farthest * (newest - first):
        return None
    # evenly spread points, the newest one among them
    # A longer stretch is thinned out: slopes of all pairs are taken
    known = known[:: -math.ceil(len(known) / 16)][::-1]
    slopes = []
    for (before, low), (after, high) in itertools.combinations(known, 2):
        if after > before:
            slopes.append((high - low) / (after - before))
    slopes.sort()
    # the median of all pairs does not follow single outliers (Theil-Sen)
    slope = median(slopes) if slopes else 0.0
    agree = sum(one > 0 for one in slopes) - sum(one < 0 for one in slopes)
    # Kendall's tau of 0.8: nine of ten pairs agree
    if slope <= 0.0 or agree < 0.8 * len(slopes):
        return None
    middle = len(known) // 2
    newer = _mean_slope(known[middle:])
    levels_off = newer < HALF * _mean_slope(known[: middle + 1])
    ahead = room / slope
    if levels_off or _jumps(known) or ahead > farthest * (now - began):
        return None
    # a slow and a fast slope: of single pairs, and of the newer half where the series bends
    slowest, fastest = (slopes[int(share * (len(slopes) - 1))] for share in LIKELY_SLOPES)
    # an interval ends at this many times the distance at the latest
    latest = 10.0 * ahead
    if min(newer, slowest) > 0.0:
        latest = min(room / min(newer, slowest), latest)
    earliest = room / max(newer, fastest)
    return now + math.ceil(ahead), now + math.ceil(earliest), now + math.ceil(latest)


def _jumps(points: Points) -> bool:
    """Nearly all of the change came at once, as where harder data begin."""
    changes = [high - low for (_, low), (_, high) in itertools.pairwise(points)]
    return max(changes) > HALF * (points[-1][1] - points[0][1])


def _mean_slope(points: Points) -> float:
    steps = points[-1][0] - points[0][0]
    return (points[-1][1] - points[0][1]) / steps if steps > 0 else 0.0


def _log2(value: float | None) -> float | None:
    """For figures that grow by factors; None where there is no logarithm."""
    if value is None or value <= 0.0 or not math.isfinite(value):
        return None
    return math.log2(value)


# --- A quantity of the looks, its limit, and its forecast.


Figures = Iterable[tuple[str, float | None, float, bool]]
"""Module or parameter, its size in one look, its limit as a binary logarithm, and whether it is
close enough to that to be worth a forecast."""


class Trend(NamedTuple):
    """A quantity of the probes that must not reach its limit."""

    quantity: str
    figures: Callable[[Look], Figures]
    rising: bool = True
    farthest: float = 1.0
    doubted: Callable[[Forecast, Sequence[Look]], bool] = lambda forecast, looks: False
    """True where another figure explains the trend harmlessly."""

    def soonest(self, looks: Sequence[Look]) -> Forecast | None:
        """The forecast for the place that meets its limit first."""
        if len(looks) < FEWEST:
            return None
        # asked of the newest look first: in a healthy run nothing is near, and no history is
        # gathered
        limits = {place: limit for place, _, limit, near in self.figures(looks[-1]) if near}
        series: dict[str, list[tuple[int, float]]] = {place: [] for place in limits}
        for look in looks if limits else ():
            for place, size, _, _ in self.figures(look):
                value = _log2(size)
                if place in series and value is not None:
                    series[place].append((look.step, value))
        found = []
        for place, points in series.items():
            forecast = crossing(
                points,
                limits[place],
                self.quantity,
                place,
                rising=self.rising,
                farthest=self.farthest,
            )
            if forecast is not None and not self.doubted(forecast, looks):
                found.append(forecast)
        return min(found, key=lambda one: one.step, default=None)

    def moves(self, before: Look, now: Look) -> bool:
        """Something is near its limit, and nearer than at the look before."""
        sign = 1.0 if self.rising else -1.0
        earlier = {place: _log2(size) for place, size, _, _ in self.figures(before)}
        for place, size, _, near in self.figures(now):
            value, then = _log2(size), earlier.get(place)
            # by a tenth of a doubling
            if near and value is not None and then is not None and sign * (value - then) > 0.1:
                return True
        return False


def _trend(quantity: str, **how: Any) -> Callable[[Callable[[Look], Figures]], Trend]:
    """Make a trend of what gives its figures."""
    return lambda figures: Trend(quantity, figures, **how)


def _coming(forecast: Forecast | None, recent: Sequence[Reading] = ()) -> Found:
    """A trend is clear, and has not reached its limit; not where the run still learns by it: the
    loss fell clearly since it began, and still falls. What grows may grow towards what is to be
    learned, and end there.
    """
    if forecast is None:
        return None
    losses = []
    for reading in recent:
        known = reading.loss is not None and math.isfinite(reading.loss)
        if known and reading.step >= forecast.since:
            losses.append(reading.loss or 0.0)
    quarter = len(losses) // 4
    # a loss that is negative may fall for ever
    if quarter > 0 and min(losses) > 0.0:
        now = median(losses[-quarter:])
        before = median(losses[-2 * quarter : -quarter])
        # share by which the loss falls during a trend in a run that learns
        fell = now < (1.0 - 0.1) * median(losses[:quarter])
        # share by which it falls from the third quarter of the trend to the last
        if fell and now < (1.0 - 0.01) * before:
            return None
    return likely(forecast=forecast)


# --- SG951: a loss scale that collapses.


@rule()
def sg951(case: Case) -> Found:
    # the scale where it changed, and now: what stays for long would hide the direction
    points: list[tuple[int, float]] = []
    for reading in case.recent:
        if reading.scale:
            value = math.log2(reading.scale)
            if not points or points[-1][1] != value or reading is case.recent[-1]:
                points.append((reading.step, value))
    # a scale below 1 makes small gradients smaller instead of larger
    forecast = crossing(points, 0.0, "the loss scale", rising=False)
    # a step went through at the scale the fall began with; else the scaler looks for its scale
    worked = {reading.scale for reading in case.recent if reading.grads_finite}
    if forecast is not None and forecast.first in worked:
        return _coming(forecast)
    return None


# --- SG952: attention logits that grow.


@_trend("the largest attention logit")
def logits(look: Look) -> Figures:
    for one in look.attention:
        # below, growth is learning
        near = one.largest_logit >= 20.0
        # largest logit above which a softmax is one-hot in any precision
        yield one.module or "the model", one.largest_logit, math.log2(1000.0), near


@rule()
def sg952(case: Case) -> Found:
    # sharp attention is what some tasks ask for
    return _coming(logits.soonest(case.looks), case.recent)


# --- SG953: values that outgrow their dtype.


NEAR, NEAR_WIDE = 8.0, 64.0
"""Bits of headroom of float16 below which a trend is reported; of wider dtypes squares overflow
from here on."""


@_trend("the largest value")
def values(look: Look) -> Figures:
    for one in look.tensors:
        value = _log2(one.largest)
        if value is not None and one.headroom is not None and one.stage != "stored":
            place = f"{one.module or 'the loss function'} ({one.stage}, {one.dtype})"
            near = one.headroom <= (NEAR if one.dtype == "float16" else NEAR_WIDE)
            yield place, one.largest, value + one.headroom, near


@_trend("the largest value")
def unscaled(look: Look) -> Figures:
    """Without what holds the loss scale, which a GradScaler takes back by itself."""
    for figure in values.figures(look):
        if "(forward, " in figure[0] and not figure[0].startswith("the loss function"):
            yield figure


@rule()
def sg953(case: Case) -> Found:
    trend = values if case.reading.scale is None else unscaled
    return _coming(trend.soonest(case.looks), case.recent)


# --- SG954: second moments that underflow.


@_trend("the smallest second moment", rising=False)
def moments(look: Look) -> Figures:
    for one in look.parameters:
        if one.variance is not None and one.dtype in ("float16", "bfloat16", "float32"):
            smallest = FORMATS[one.dtype].smallest
            # beside an epsilon that is larger than its root a second moment of 0 changes nothing
            alone = one.epsilon is not None and one.epsilon**2 < smallest
            yield one.name, one.variance, math.log2(smallest), alone


@rule()
def sg954(case: Case) -> Found:
    return _coming(moments.soonest(case.looks))


# --- SG955: a norm that grows without bound.


SQUARES, LARGEST = 64.0, 128.0
"""What is above 2**64 has a square that float32 and bfloat16 cannot hold; they end at 2**128."""
LARGE_WEIGHT, LARGE_INPUT = 2.0**10, 2.0**20
"""Root mean squares that no healthy run shows."""


@_trend("the root mean square")
def sizes(look: Look) -> Figures:
    for weight in look.parameters:
        yield weight.name, weight.weight, SQUARES, weight.weight >= LARGE_WEIGHT
    for norm in look.norms:
        yield f"what enters {norm.module}", norm.scale, SQUARES, norm.scale >= LARGE_INPUT


@rule()
def sg955(case: Case) -> Found:
    # the loss and the gradient norm only grow together in a run that diverges: look farther ahead
    return _coming(_diverging(case.recent, 10.0) or sizes.soonest(case.looks))


def _diverging(recent: Sequence[Reading], farthest: float) -> Forecast | None:
    """Loss and gradient norm grow together, step by step."""
    found = []
    for name, limit in (("the gradient norm", SQUARES), ("the loss", LARGEST)):
        points = []
        for one in recent:
            size = one.grad_norm
            if limit == LARGEST:
                # a critic's loss runs away downwards
                size = None if one.loss is None else abs(one.loss)
            logarithm = _log2(size)
            if logarithm is not None:
                points.append((one.step, logarithm))
        lowest = min((value for _, value in points), default=math.inf)
        # doublings of loss and gradient norm, both, that make a divergence
        if not points or points[-1][1] - lowest < 4.0:
            return None
        forecast = crossing(points, limit, name, fewest=6, farthest=farthest)
        if forecast is not None:
            found.append(forecast)
    return min(found, key=lambda one: one.step, default=None)


# --- SG956: updates above the stable range.


def _from_the_gradient(forecast: Forecast, looks: Sequence[Look]) -> bool:
    """Half of the growth comes from the gradient: one that grows is a loss surface that becomes
    steeper, as behind a plateau, and ends by itself or is SG955.
    """
    gradients = {}
    for look in looks:
        for one in look.parameters:
            if one.name == forecast.place:
                gradients[look.step] = _log2(one.gradient)
    before, now = gradients.get(forecast.since), gradients.get(forecast.now)
    if before is None or now is None:
        return True
    return now - before > math.log2(forecast.value / forecast.first) / 2.0


# a warm-up ends by itself, so this forecast reaches less far than others
@_trend("update beside weight", farthest=0.5, doubted=_from_the_gradient)
def ratios(look: Look) -> Figures:
    for one in look.parameters:
        # small tensors jump; so do biases, which begin at 0: any update is large beside nothing
        small = one.elements < 64 or one.name.endswith("bias")
        if one.ratio is not None and not small:
            # an update this large beside its weight: a few of them replace the weight
            yield one.name, one.ratio, math.log2(0.3), one.ratio >= 0.05


@rule()
def sg956(case: Case) -> Found:
    return _coming(ratios.soonest(case.looks))


def trend_begins(looks: Sequence[Look], recent: Sequence[Reading]) -> bool:
    """Something is near a limit, or on its way there: worth a closer look, not worth reporting."""
    if _diverging(recent, 20.0) is not None:
        return True
    trends = (logits, values, moments, sizes, ratios)
    return len(looks) > 1 and any(trend.moves(looks[-2], looks[-1]) for trend in trends)
