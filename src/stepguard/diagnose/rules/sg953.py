"""SG953: values that outgrow their dtype."""

from __future__ import annotations

from collections.abc import Iterable

from stepguard.diagnose.ahead import Figure, Trend, is_learning, log2, soonest
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, foretold
from stepguard.records.look import Look

NEAR = {"float16": 8.0}
"""Bits of headroom from which on a trend is told."""
NEAR_WIDE = 64.0
"""The same for wider dtypes: squares overflow from here on."""
OUTSIDE = "the loss function"


def recognise(case: Case) -> Proof | None:
    trend = TREND
    if case.reading.scale is not None:
        trend = UNSCALED
    forecast = soonest(case.looks, trend)
    if forecast is None or is_learning(case.recent, forecast.since):
        return None
    return foretold(forecast, "beyond is infinity")


def _figures(look: Look) -> Iterable[Figure]:
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
    for figure in _figures(look):
        if "(forward, " in figure.place and not figure.place.startswith(OUTSIDE):
            yield figure


TREND = Trend(quantity="the largest value", figures=_figures)
UNSCALED = Trend(quantity="the largest value", figures=_unscaled)
RULE = Rule(code="SG953", recognise=recognise)
