"""SG955: a norm that grows without bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepguard.diagnose.ahead import Figure, Trend, forecast_of, log2, soonest
from stepguard.diagnose.case import Case
from stepguard.diagnose.crossing import Clarity, Points, crossing
from stepguard.diagnose.rule import Proof, Rule, foretold
from stepguard.records import Reading
from stepguard.records.forecast import Forecast
from stepguard.records.look import Look

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


def recognise(case: Case) -> Proof | None:
    forecast = diverging(case.recent, DIVERGING) or soonest(case.looks, TREND)
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


def _figures(look: Look) -> Iterable[Figure]:
    for weight in look.parameters:
        value = log2(weight.weight)
        large = weight.weight >= LARGE_WEIGHT
        yield Figure(place=weight.name, value=value, limit=SQUARES, near=large)
    for norm in look.norms:
        value = log2(norm.scale)
        large = norm.scale >= LARGE_INPUT
        yield Figure(place=f"what enters {norm.module}", value=value, limit=SQUARES, near=large)


TREND = Trend(quantity="the root mean square", figures=_figures)
RULE = Rule(code="SG955", recognise=recognise)
