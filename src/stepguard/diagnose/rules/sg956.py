"""SG956: updates above the stable range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stepguard.diagnose.ahead import Figure, Trend, log2, soonest
from stepguard.diagnose.case import Case
from stepguard.diagnose.crossing import Clarity
from stepguard.diagnose.rule import Proof, Rule, foretold
from stepguard.records.forecast import Forecast
from stepguard.records.look import Look

UNSTABLE = 0.3
"""An update this large beside its weight: a few of them replace the weight."""
NEAR = 0.05
FEWEST_ELEMENTS = 64
"""Small tensors jump; so do biases, which begin at 0: any update is large beside nothing."""
SOON = Clarity(farthest=0.5)
"""A warm-up ends by itself, so a forecast reaches less far than others."""
OWN_GROWTH = 0.5
"""Share of the growth that must not come from the gradient: one that grows is a loss surface that
becomes steeper, as behind a plateau, and ends by itself or is SG955."""


def recognise(case: Case) -> Proof | None:
    forecast = soonest(case.looks, TREND, SOON)
    return foretold(forecast, "a few updates replace what the weight had learned")


def _figures(look: Look) -> Iterable[Figure]:
    for one in look.parameters:
        small = one.elements < FEWEST_ELEMENTS or one.name.endswith("bias")
        if one.ratio is not None and not small:
            yield Figure(
                place=one.name,
                value=log2(one.ratio),
                limit=math.log2(UNSTABLE),
                near=one.ratio >= NEAR,
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


TREND = Trend(quantity="update beside weight", figures=_figures, doubted=_from_the_gradient)
RULE = Rule(code="SG956", recognise=recognise)
