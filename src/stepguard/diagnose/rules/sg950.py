"""SG955: a norm that grows without bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stepguard.diagnose.case import Case, Clarity, Points, crossing
from stepguard.diagnose.rule import Proof, Rule, foretold
from stepguard.diagnose.trends import Figure, Trend, forecast_of, is_learning, log2, soonest
from stepguard.records import Reading
from stepguard.records.probes import Forecast, Look

# --- SG951: a loss scale that collapses.


LOWEST = 1.0
"""A scale below makes small gradients smaller instead of larger."""


def recognise_sg951(case: Case) -> Proof | None:
    points = changes(case)
    ahead = crossing(points, math.log2(LOWEST), rising=False)
    if ahead is None or not _worked(case, points, ahead.since):
        return None
    forecast = forecast_of("the loss scale", "", points, math.log2(LOWEST), ahead)
    return foretold(forecast, "every step is skipped from then on, or small gradients are 0")


def changes(case: Case) -> list[tuple[int, float]]:
    """The scale where it changed, and now: what stays for long would hide the direction."""
    points: list[tuple[int, float]] = []
    for reading in case.recent:
        if reading.scale:
            value = math.log2(reading.scale)
            if not points or points[-1][1] != value or reading is case.recent[-1]:
                points.append((reading.step, value))
    return points


def _worked(case: Case, points: list[tuple[int, float]], since: int) -> bool:
    """A step went through at the scale the fall began with; else the scaler looks for its scale."""
    scale = 2.0 ** dict(points)[since]
    return any(reading.scale == scale and reading.grads_finite for reading in case.recent)


SG951 = Rule(code="SG951", recognise=recognise_sg951)


# --- SG952: attention logits that grow.


SATURATED = 1000.0
"""Largest logit from which on a softmax is one-hot in any precision."""
HARMLESS = 20.0
"""Below, growth is learning."""


def recognise_sg952(case: Case) -> Proof | None:
    forecast = soonest(case.looks, TREND)
    # sharp attention is what some tasks ask for
    if forecast is None or is_learning(case.recent, forecast.since):
        return None
    return foretold(forecast, "attention looks at one key only, and stops to learn")


def _figures(look: Look) -> Iterable[Figure]:
    for one in look.attention:
        yield Figure(
            place=one.module or "the model",
            value=log2(one.largest_logit),
            limit=math.log2(SATURATED),
            near=one.largest_logit >= HARMLESS,
        )


TREND = Trend(quantity="the largest attention logit", figures=_figures)
SG952 = Rule(code="SG952", recognise=recognise_sg952)


# --- SG953: values that outgrow their dtype.


NEAR = {"float16": 8.0}
"""Bits of headroom from which on a trend is told."""
NEAR_WIDE = 64.0
"""The same for wider dtypes: squares overflow from here on."""
OUTSIDE = "the loss function"


def recognise_sg953(case: Case) -> Proof | None:
    trend = SG953_TREND
    if case.reading.scale is not None:
        trend = UNSCALED
    forecast = soonest(case.looks, trend)
    if forecast is None or is_learning(case.recent, forecast.since):
        return None
    return foretold(forecast, "beyond is infinity")


def _sg953_figures(look: Look) -> Iterable[Figure]:
    for one in look.tensors:
        value = log2(one.largest)
        if value is None or one.headroom is None or one.stage == "stored":
            continue
        yield Figure(
            place=f"{one.module or OUTSIDE} ({one.stage}, {one.dtype})",
            value=value,
            limit=value + one.headroom,
            near=one.headroom <= NEAR.get(one.dtype, NEAR_WIDE),
        )


def _unscaled(look: Look) -> Iterable[Figure]:
    """Without what holds the loss scale, which a GradScaler takes back by itself."""
    for figure in _sg953_figures(look):
        if "(forward, " in figure.place and not figure.place.startswith(OUTSIDE):
            yield figure


SG953_TREND = Trend(quantity="the largest value", figures=_sg953_figures)
UNSCALED = Trend(quantity="the largest value", figures=_unscaled)
SG953 = Rule(code="SG953", recognise=recognise_sg953)


# --- SG954: second moments that underflow.


SMALLEST = {"float16": -24.0, "bfloat16": -133.0, "float32": -149.0}
"""Binary logarithm of the smallest number that is not 0."""


def recognise_sg954(case: Case) -> Proof | None:
    return foretold(
        soonest(case.looks, SG954_TREND), "it is 0 from then on, and the update divides by nothing"
    )


def _sg954_figures(look: Look) -> Iterable[Figure]:
    for one in look.parameters:
        smallest = SMALLEST.get(one.dtype)
        if one.variance is None or smallest is None:
            continue
        # beside an epsilon that is larger than its root a second moment of 0 changes nothing
        covered = one.epsilon is None or one.epsilon**2 >= 2.0**smallest
        yield Figure(place=one.name, value=log2(one.variance), limit=smallest, near=not covered)


SG954_TREND = Trend(quantity="the smallest second moment", figures=_sg954_figures, rising=False)
SG954 = Rule(code="SG954", recognise=recognise_sg954)


# --- SG955: a norm that grows without bound.


SQUARES = 64.0
"""What is above 2**64 has a square that float32 and bfloat16 cannot hold."""
LARGEST = 128.0
"""The end of float32 and bfloat16."""
LARGE_WEIGHT = 2.0**10
LARGE_INPUT = 2.0**20
"""Root mean squares that no healthy run shows."""
LEAST_GROWTH = 4.0
"""Doublings of loss and gradient norm, both, that make a divergence."""
DIVERGING = Clarity(fewest=6, farthest=10.0)
"""Both grow together or not at all in a healthy run, so a forecast may reach farther."""
BEGINS = Clarity(fewest=6, farthest=20.0)
CONSEQUENCE = "its square is infinity from then on"


def recognise_sg955(case: Case) -> Proof | None:
    forecast = diverging(case.recent, DIVERGING) or soonest(case.looks, SG955_TREND)
    return foretold(forecast, CONSEQUENCE)


def diverging(recent: Sequence[Reading], clarity: Clarity) -> Forecast | None:
    """Loss and gradient norm grow together, step by step."""
    norms = _points([(reading.step, reading.grad_norm) for reading in recent])
    losses = _points([(reading.step, _size(reading.loss)) for reading in recent])
    if _growth(norms) < LEAST_GROWTH or _growth(losses) < LEAST_GROWTH:
        return None
    found = []
    for name, points, limit in (
        ("the gradient norm", norms, SQUARES),
        ("the loss", losses, LARGEST),
    ):
        ahead = crossing(points, limit, rising=True, clarity=clarity)
        if ahead is not None:
            found.append(forecast_of(name, "", points, limit, ahead))
    return min(found, key=lambda one: one.step, default=None)


def _size(loss: float | None) -> float | None:
    # a critic's loss runs away downwards
    return None if loss is None else abs(loss)


def _points(values: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    points = []
    for step, value in values:
        logarithm = log2(value)
        if logarithm is not None:
            points.append((step, logarithm))
    return points


def _growth(points: Points) -> float:
    """Doublings above the lowest value seen."""
    if not points:
        return 0.0
    return points[-1][1] - min(value for _, value in points)


def _sg955_figures(look: Look) -> Iterable[Figure]:
    for weight in look.parameters:
        value = log2(weight.weight)
        large = weight.weight >= LARGE_WEIGHT
        yield Figure(place=weight.name, value=value, limit=SQUARES, near=large)
    for norm in look.norms:
        value = log2(norm.scale)
        large = norm.scale >= LARGE_INPUT
        yield Figure(place=f"what enters {norm.module}", value=value, limit=SQUARES, near=large)


SG955_TREND = Trend(quantity="the root mean square", figures=_sg955_figures)
SG955 = Rule(code="SG955", recognise=recognise_sg955)


# --- SG956: updates above the stable range.


UNSTABLE = 0.3
"""An update this large beside its weight: a few of them replace the weight."""
SG956_NEAR = 0.05
FEWEST_ELEMENTS = 64
"""Small tensors jump; so do biases, which begin at 0: any update is large beside nothing."""
SOON = Clarity(farthest=0.5)
"""A warm-up ends by itself, so a forecast reaches less far than others."""
OWN_GROWTH = 0.5
"""Share of the growth that must not come from the gradient: one that grows is a loss surface that
becomes steeper, as behind a plateau, and ends by itself or is SG955."""


def recognise_sg956(case: Case) -> Proof | None:
    forecast = soonest(case.looks, SG956_TREND, SOON)
    return foretold(forecast, "a few updates replace what the weight had learned")


def _sg956_figures(look: Look) -> Iterable[Figure]:
    for one in look.parameters:
        small = one.elements < FEWEST_ELEMENTS or one.name.endswith("bias")
        if one.ratio is not None and not small:
            yield Figure(
                place=one.name,
                value=log2(one.ratio),
                limit=math.log2(UNSTABLE),
                near=one.ratio >= SG956_NEAR,
            )


def _from_the_gradient(forecast: Forecast, looks: Sequence[Look]) -> bool:
    sizes = {}
    for look in looks:
        for one in look.parameters:
            if one.name == forecast.place:
                sizes[look.step] = log2(one.gradient)
    before = sizes.get(forecast.since)
    now = sizes.get(forecast.now)
    if before is None or now is None:
        return True
    growth = math.log2(forecast.value / forecast.first)
    return now - before > (1.0 - OWN_GROWTH) * growth


SG956_TREND = Trend(
    quantity="update beside weight", figures=_sg956_figures, doubted=_from_the_gradient
)
SG956 = Rule(code="SG956", recognise=recognise_sg956)
