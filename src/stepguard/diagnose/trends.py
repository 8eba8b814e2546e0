"""Trends: did the learning rate jump, was the loss already rising, where does a figure run to?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from stepguard.diagnose.case import Case
from stepguard.records import Reading
from stepguard.records.probes import Forecast, Look

# --- What the recent steps say: did the learning rate jump, was the loss already rising?


ABOVE_ALL = 2.5
"""Times above every rate seen before: a linear warm-up, which doubles at first, does not jump."""
ABOVE_CONFIGURED = 2.0
IN_ONE_STEP = 5.0
"""Times above the rate of the step before: a schedule that was thrown back."""
CLIMB = 2.0
"""Times above the first rate, or the declared one, from which on the schedule is worth a word."""
RISING = 10.0
"""Times the loss grew over the remembered steps."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A learning rate that is not what it was: by a jump, or step by step since the run began."""

    group: int
    before: float
    """The rate before the jump, the configured one, or that of the first step."""
    now: float
    steps: int | None = None
    """Steps since; None where it is measured against the configuration, or not known."""
    declared: float | None = None
    """What the schedule calls its highest rate; None without a schedule."""

    @property
    def times(self) -> float:
        return self.now / self.before

    @property
    def runaway(self) -> bool:
        """Above everything that was declared: a warm-up without an end."""
        return bool(self.declared) and self.now > CLIMB * (self.declared or 0.0)

    @property
    def above_declared(self) -> float | None:
        return self.now / self.declared if self.declared else None

    @property
    def when(self) -> str:
        """When a jump was, seen from the bad step."""
        if not self.steps:
            return "" if self.steps is None else "in this very step"
        return f"{self.steps} step{'s' if self.steps > 1 else ''} before the bad one"


def lr_climb(case: Case) -> Rise | None:
    """The group whose rate has grown most since the first step; None when none has grown much."""
    facts = case.facts
    begun = facts.first_lr
    if not begun and facts.lr_history:
        begun = facts.lr_history[0]
    found = []
    for group, (first, now) in enumerate(zip(begun, case.reading.lr, strict=False)):
        declared = facts.initial_lr[group] if group < len(facts.initial_lr) else None
        climb = Rise(group, first, now, facts.committed or None, declared or None)
        if climb.runaway or now > CLIMB * first > 0:
            found.append(climb)
    return max(found, key=lambda climb: (climb.runaway, climb.now), default=None)


def lr_jump(case: Case) -> Rise | None:
    """The largest unexplained rise of a learning rate; None when all followed their schedule."""
    history = case.facts.lr_history
    jumps = []
    for group in range(min(map(len, history), default=0)):
        rates = [row[group] for row in history]
        for position in range(1, len(rates)):
            now, before, top = rates[position], rates[position - 1], max(rates[:position])
            # a group that stood still so far is measured by the others
            if top == 0:
                before = top = max(map(max, history[:position]))
            if before > 0 and (now > ABOVE_ALL * top or now > IN_ONE_STEP * before):
                jumps.append(Rise(group, before, now, len(rates) - 1 - position))
    jumps.extend(above_configured(case)[:1])
    # the judge has already compared the rate with its ceiling
    bad, rate, ceiling = (case.said.get(name) for name in ("group", "lr", "ceiling"))
    if (
        isinstance(bad, int)
        and isinstance(rate, int | float)
        and isinstance(ceiling, int | float)
        and ceiling > 0
        and math.isfinite(rate)
    ):
        jumps.append(Rise(bad, float(ceiling), float(rate)))
    return max(jumps, key=lambda jump: jump.times, default=None)


def above_configured(case: Case, *, climbing: bool = False) -> list[Rise]:
    """Groups whose rate is above the configured one.

    `climbing`: also where a schedule (OneCycle, a linear warm-up) has climbed from its start.
    """
    facts = case.facts
    found = []
    pairs = zip(facts.configured_lr, case.reading.lr, strict=False)
    for group, (allowed, rate) in enumerate(pairs):
        if not 0 < ABOVE_CONFIGURED * allowed < rate:
            continue
        rates = [row[group] for row in facts.lr_history if group < len(row)]
        from_start = facts.committed is None or facts.committed < len(rates)
        climbed = not from_start or rates[:1] <= [ABOVE_CONFIGURED * allowed]
        if climbing or facts.resumed or len(rates) < 2 or not climbed:
            found.append(Rise(group, allowed, rate))
    return found


def lr_not_a_number(case: Case) -> int | None:
    """The group whose learning rate is NaN or infinite."""
    for group, rate in enumerate(case.reading.lr):
        if not math.isfinite(rate):
            return group
    return None


def growth(values: tuple[float, ...]) -> float:
    """How many times larger the last value is than the smallest before it; 1 when unknown."""
    lowest = min(map(abs, values[:-1]), default=0.0)
    return abs(values[-1]) / lowest if lowest > 0 else 1.0


def rising(case: Case) -> bool:
    """Losses or gradient norms had already grown manifold before the step went bad."""
    return growth(case.facts.losses) >= RISING or growth(case.facts.grad_norms) >= RISING


# --- Where a series of numbers runs to: the step at which it meets a limit, with an interval.


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
LARGEST_POWER = 1023.0
"""What Python's numbers can hold."""
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


def crossing(
    points: Points,
    limit: float,
    quantity: str = "",
    place: str = "",
    *,
    rising: bool = True,
    clarity: Clarity = CLEAR,
) -> Forecast | None:
    """When a series of binary logarithms meets `limit` if it goes on as it did; None where no trend
    is clear or it is far.
    """
    sign = 1.0 if rising else -1.0
    known = [(step, sign * value) for step, value in points if math.isfinite(value)]
    for length in (*WINDOWS, clarity.fewest):
        if clarity.fewest > min(length, len(known)):
            continue
        window = known[-length:]
        found = _in_window(window, sign * limit, clarity)
        if found is not None:
            step, earliest, latest = found
            return Forecast(
                quantity=quantity,
                place=place,
                since=window[0][0],
                first=2.0 ** (sign * window[0][1]),
                now=window[-1][0],
                value=2.0 ** (sign * window[-1][1]),
                limit=2.0 ** min(limit, LARGEST_POWER),
                step=step,
                earliest=earliest,
                latest=latest,
            )
    return None


def _in_window(known: Points, limit: float, clarity: Clarity) -> tuple[int, int, int] | None:
    """The step at which a series that rises meets its limit, the earliest and the latest one."""
    began, first = known[0]
    now, newest = known[-1]
    room = limit - newest
    # asked first, since it is cheap and nearly always ends the matter
    if room <= 0.0 or room > 2.0 * clarity.farthest * (newest - first):
        return None
    # evenly spread points, the newest one among them
    known = known[:: -math.ceil(len(known) / MOST_POINTS)][::-1]
    slopes = []
    for (before, low), (after, high) in itertools.combinations(known, 2):
        if after > before:
            slopes.append((high - low) / (after - before))
    slopes.sort()
    # the median of all pairs does not follow single outliers (Theil-Sen)
    slope = median(slopes) if slopes else 0.0
    agree = sum(one > 0 for one in slopes) - sum(one < 0 for one in slopes)
    if slope <= 0.0 or agree < clarity.agreement * len(slopes) or levelling_off(known):
        return None
    # nearly all of the change came at once, as where harder data begin
    changes = [high - low for (_, low), (_, high) in itertools.pairwise(known)]
    ahead = room / slope
    if max(changes) > JUMP * (newest - known[0][1]) or ahead > clarity.farthest * (now - began):
        return None
    # a slow and a fast slope: of single pairs, and of the newer half where the series bends
    newer = _mean_slope(known[len(known) // 2 :])
    slowest = min(newer, slopes[int(LIKELY_SLOPES[0] * (len(slopes) - 1))])
    fastest = max(newer, slopes[int(LIKELY_SLOPES[1] * (len(slopes) - 1))])
    latest = FARTHEST_END * ahead
    if slowest > 0.0:
        latest = min(room / slowest, latest)
    return now + math.ceil(ahead), now + math.ceil(room / fastest), now + math.ceil(latest)


def levelling_off(points: Points) -> bool:
    """The second half rises more slowly than the first."""
    middle = len(points) // 2
    return _mean_slope(points[middle:]) < SLOWING * _mean_slope(points[: middle + 1])


def _mean_slope(points: Points) -> float:
    steps = points[-1][0] - points[0][0]
    return (points[-1][1] - points[0][1]) / steps if steps > 0 else 0.0


# --- What the rules on coming trouble share: a figure of the looks, its limit, and its forecast.


LEARNED = 0.1
"""Share by which the loss falls during a trend in a run that learns."""
LEARNS = 0.01
"""Share by which it falls from the third quarter of the trend to the last."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one look."""

    place: str
    """Module or parameter."""
    size: float | None
    limit: float
    """As a binary logarithm."""
    near: bool
    """Close enough to its limit to be worth a forecast."""

    @property
    def value(self) -> float | None:
        """As a binary logarithm."""
        return log2(self.size)


@dataclass(frozen=True, slots=True)
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
    series: dict[str, list[tuple[int, float]]] = {place: [] for place in newest}
    for look in looks:
        for figure in trend.figures(look):
            if figure.place in series and figure.value is not None:
                series[figure.place].append((look.step, figure.value))
    for place, points in series.items():
        limit = newest[place].limit
        forecast = crossing(
            points, limit, trend.quantity, place, rising=trend.rising, clarity=clarity
        )
        if forecast is not None and not trend.doubted(forecast, looks):
            found.append(forecast)
    return min(found, key=lambda one: one.step, default=None)


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
