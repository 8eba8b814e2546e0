"""What the recent steps say: did the learning rate jump, was the loss already rising?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stepguard.diagnose.case import CLEAR, Case, Clarity, Crossing, Points, crossing
from stepguard.records import Reading
from stepguard.records.probes import Forecast, Look

# --- What the recent steps say: did the learning rate jump, was the loss already rising?


ABOVE_ALL = 2.5
"""Times above every rate seen before: a linear warm-up, which doubles at first, does not jump."""
ABOVE_CONFIGURED = 2.0
IN_ONE_STEP = 5.0
"""Times above the rate of the step before: a schedule that was thrown back."""
RISING = 10.0
"""Times the loss grew over the remembered steps."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A learning rate that is not what came before it."""

    group: int
    before: float
    now: float
    steps_ago: int | None
    """Steps between the jump and the bad step; None when measured against the configuration."""

    @property
    def sentence(self) -> str:
        times = ""
        if self.before > 0:
            times = f"{self.now / self.before:.3g} times "
        against = "the rate before"
        if self.steps_ago is None:
            against = "the configured rate"
        return (
            f"group {self.group} runs with lr {self.now:.4g}, {times}{against} "
            f"({self.before:.4g}){self._when}"
        )

    @property
    def _when(self) -> str:
        if self.steps_ago is None:
            return ""
        if self.steps_ago == 0:
            return ", in this very step"
        steps = "steps"
        if self.steps_ago == 1:
            steps = "step"
        return f", {self.steps_ago} {steps} before the bad one"

    @property
    def times(self) -> float:
        return self.now / self.before


CLIMB = 2.0
"""Times above the first rate, or the declared one, from which on the schedule is worth a word."""


@dataclass(frozen=True, slots=True)
class Climb:
    """A learning rate that has grown step by step since the run began."""

    group: int
    first: float
    now: float
    steps: int | None
    declared: float | None
    """What the schedule calls its highest rate; None without a schedule."""

    @property
    def runaway(self) -> bool:
        """Above everything that was declared: a warm-up without an end."""
        return self.declared is not None and self.declared > 0 and self.now > CLIMB * self.declared

    @property
    def sentence(self) -> str:
        over = ""
        if self.steps:
            over = f" over {self.steps} steps"
        said = (
            f"the learning rate of group {self.group} has grown from {self.first:.4g} to "
            f"{self.now:.4g}{over}"
        )
        if self.declared:
            said += f" and is {self.now / self.declared:.3g} times initial_lr ({self.declared:.4g})"
        return said


def lr_climb(case: Case) -> Climb | None:
    """The group whose rate has grown most since the first step; None when none has grown much."""
    begun = case.facts.first_lr
    if not begun and case.facts.lr_history:
        begun = case.facts.lr_history[0]
    found = []
    for group, (first, now) in enumerate(zip(begun, case.reading.lr, strict=False)):
        declared = None
        if group < len(case.facts.initial_lr):
            declared = case.facts.initial_lr[group]
        climb = Climb(group, first, now, case.facts.committed, declared)
        if climb.runaway or now > CLIMB * first > 0:
            found.append(climb)
    return max(found, key=lambda climb: (climb.runaway, climb.now), default=None)


def lr_jump(case: Case) -> Jump | None:
    """The largest unexplained rise of a learning rate; None when all followed their schedule."""
    candidates = (_in_history(case), _over_configured(case), _in_verdict(case))
    jumps = [jump for jump in candidates if jump is not None]
    return max(jumps, key=lambda jump: jump.times, default=None)


def _in_history(case: Case) -> Jump | None:
    history = case.facts.lr_history
    groups = min((len(rates) for rates in history), default=0)
    jumps: list[Jump] = []
    for group in range(groups):
        jumps.extend(_jumps_of(group, history))
    return max(jumps, key=lambda jump: jump.times, default=None)


def _jumps_of(group: int, history: Sequence[Sequence[float]]) -> Iterator[Jump]:
    rates = [row[group] for row in history]
    for position in range(1, len(rates)):
        now = rates[position]
        before = rates[position - 1]
        top = max(rates[:position])
        # a group that stood still so far is measured by the others
        if top == 0:
            top = max(max(row) for row in history[:position])
            before = top
        if before > 0 and (now > ABOVE_ALL * top or now > IN_ONE_STEP * before):
            yield Jump(group, before, now, len(rates) - 1 - position)


def _over_configured(case: Case) -> Jump | None:
    pairs = zip(case.facts.configured_lr, case.reading.lr, strict=False)
    for group, (allowed, rate) in enumerate(pairs):
        if allowed > 0 and rate > ABOVE_CONFIGURED * allowed and not _climbed(case, group, allowed):
            return Jump(group, allowed, rate, None)
    return None


def _climbed(case: Case, group: int, allowed: float) -> bool:
    """Has a schedule (OneCycle, a linear warm-up) climbed from its start without any jump?"""
    rates = [row[group] for row in case.facts.lr_history if group < len(row)]
    if case.facts.resumed or len(rates) < 2:
        return False
    from_the_start = case.facts.committed is None or case.facts.committed < len(rates)
    return not from_the_start or rates[0] <= ABOVE_CONFIGURED * allowed


def _in_verdict(case: Case) -> Jump | None:
    """The judge has already compared the rate with its ceiling."""
    said = case.verdict.evidence or {}
    group = said.get("group")
    rate = said.get("lr")
    ceiling = said.get("ceiling")
    if not isinstance(group, int) or not isinstance(rate, int | float):
        return None
    if not isinstance(ceiling, int | float) or ceiling <= 0 or not math.isfinite(rate):
        return None
    return Jump(group, float(ceiling), float(rate), None)


def lr_not_a_number(case: Case) -> int | None:
    """The group whose learning rate is NaN or infinite."""
    for group, rate in enumerate(case.reading.lr):
        if not math.isfinite(rate):
            return group
    return None


def growth(values: tuple[float, ...]) -> float:
    """How many times larger the last value is than the smallest before it; 1 when unknown."""
    if len(values) < 2:
        return 1.0
    lowest = min(abs(value) for value in values[:-1])
    if lowest > 0:
        return abs(values[-1]) / lowest
    return 1.0


def rising(case: Case) -> bool:
    """Losses or gradient norms had already grown manifold before the step went bad."""
    return growth(case.facts.losses) >= RISING or growth(case.facts.grad_norms) >= RISING


# --- What the rules on coming trouble share: a figure of the looks, its limit, and its forecast.


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
