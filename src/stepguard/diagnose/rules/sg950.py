"""SG951 to SG956: what a healthy run is heading for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, likely, rule
from stepguard.diagnose.trends import (
    Clarity,
    Figure,
    Trend,
    crossing,
    is_learning,
    log2,
    soonest,
)
from stepguard.records import Reading
from stepguard.records.probes import Forecast, Look


def _coming(forecast: Forecast | None, learning: Sequence[Reading] = ()) -> Proof | None:
    """A trend is clear, and has not reached its limit; not where the run still learns by it."""
    if forecast is None or is_learning(learning, forecast.since):
        return None
    return likely(forecast=forecast)


# --- SG951: a loss scale that collapses.


@rule()
def sg951(case: Case) -> Proof | None:
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
    return _coming(forecast) if forecast is not None and forecast.first in worked else None


# --- SG952: attention logits that grow.


SATURATED = 1000.0
"""Largest logit from which on a softmax is one-hot in any precision."""
HARMLESS = 20.0
"""Below, growth is learning."""


def _logits(look: Look) -> Iterable[Figure]:
    for one in look.attention:
        near = one.largest_logit >= HARMLESS
        yield Figure(one.module or "the model", one.largest_logit, math.log2(SATURATED), near)


@rule()
def sg952(case: Case) -> Proof | None:
    # sharp attention is what some tasks ask for
    return _coming(soonest(case.looks, LOGITS), case.recent)


# --- SG953: values that outgrow their dtype.


NEAR = {"float16": 8.0}
"""Bits of headroom from which on a trend is reported."""
NEAR_WIDE = 64.0
"""The same for wider dtypes: squares overflow from here on."""


def _values(look: Look) -> Iterable[Figure]:
    for one in look.tensors:
        value = log2(one.largest)
        if value is not None and one.headroom is not None and one.stage != "stored":
            place = f"{one.module or 'the loss function'} ({one.stage}, {one.dtype})"
            near = one.headroom <= NEAR.get(one.dtype, NEAR_WIDE)
            yield Figure(place, one.largest, value + one.headroom, near)


def _unscaled(look: Look) -> Iterable[Figure]:
    """Without what holds the loss scale, which a GradScaler takes back by itself."""
    for figure in _values(look):
        if "(forward, " in figure.place and not figure.place.startswith("the loss function"):
            yield figure


@rule()
def sg953(case: Case) -> Proof | None:
    trend = VALUES if case.reading.scale is None else UNSCALED
    return _coming(soonest(case.looks, trend), case.recent)


# --- SG954: second moments that underflow.


SMALLEST = {"float16": -24.0, "bfloat16": -133.0, "float32": -149.0}
"""Binary logarithm of the smallest number that is not 0."""


def _moments(look: Look) -> Iterable[Figure]:
    for one in look.parameters:
        smallest = SMALLEST.get(one.dtype)
        if one.variance is not None and smallest is not None:
            # beside an epsilon that is larger than its root a second moment of 0 changes nothing
            bare = one.epsilon is not None and one.epsilon**2 < 2.0**smallest
            yield Figure(one.name, one.variance, smallest, bare)


@rule()
def sg954(case: Case) -> Proof | None:
    return _coming(soonest(case.looks, MOMENTS))


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


def _sizes(look: Look) -> Iterable[Figure]:
    for weight in look.parameters:
        yield Figure(weight.name, weight.weight, SQUARES, weight.weight >= LARGE_WEIGHT)
    for norm in look.norms:
        yield Figure(f"what enters {norm.module}", norm.scale, SQUARES, norm.scale >= LARGE_INPUT)


@rule()
def sg955(case: Case) -> Proof | None:
    return _coming(diverging(case.recent, DIVERGING) or soonest(case.looks, SIZES))


def diverging(recent: Sequence[Reading], clarity: Clarity) -> Forecast | None:
    """Loss and gradient norm grow together, step by step."""
    found = []
    # a critic's loss runs away downwards
    losses = [(one.step, None if one.loss is None else abs(one.loss)) for one in recent]
    norms = [(one.step, one.grad_norm) for one in recent]
    for name, values, limit in (
        ("the gradient norm", norms, SQUARES),
        ("the loss", losses, LARGEST),
    ):
        points = []
        for step, value in values:
            logarithm = log2(value)
            if logarithm is not None:
                points.append((step, logarithm))
        lowest = min((value for _, value in points), default=math.inf)
        if not points or points[-1][1] - lowest < LEAST_GROWTH:
            return None
        forecast = crossing(points, limit, name, clarity=clarity)
        if forecast is not None:
            found.append(forecast)
    return min(found, key=lambda one: one.step, default=None)


# --- SG956: updates above the stable range.


UNSTABLE = 0.3
"""An update this large beside its weight: a few of them replace the weight."""
LARGE_UPDATE = 0.05
FEWEST_ELEMENTS = 64
"""Small tensors jump; so do biases, which begin at 0: any update is large beside nothing."""
SOON = Clarity(farthest=0.5)
"""A warm-up ends by itself, so a forecast reaches less far than others."""
OWN_GROWTH = 0.5
"""Share of the growth that must not come from the gradient: one that grows is a loss surface that
becomes steeper, as behind a plateau, and ends by itself or is SG955."""


def _updates(look: Look) -> Iterable[Figure]:
    for one in look.parameters:
        small = one.elements < FEWEST_ELEMENTS or one.name.endswith("bias")
        if one.ratio is not None and not small:
            yield Figure(one.name, one.ratio, math.log2(UNSTABLE), one.ratio >= LARGE_UPDATE)


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


@rule()
def sg956(case: Case) -> Proof | None:
    return _coming(soonest(case.looks, UPDATES, SOON))


LOGITS = Trend("the largest attention logit", _logits)
VALUES = Trend("the largest value", _values)
UNSCALED = Trend("the largest value", _unscaled)
MOMENTS = Trend("the smallest second moment", _moments, rising=False)
SIZES = Trend("the root mean square", _sizes)
UPDATES = Trend("update beside weight", _updates, doubted=_from_the_gradient)
TRENDS = (LOGITS, VALUES, MOMENTS, SIZES, UPDATES)
