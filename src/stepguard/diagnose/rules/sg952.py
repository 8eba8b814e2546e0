"""SG952: attention logits that grow."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.diagnose.ahead import Figure, Trend, is_learning, log2, soonest
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, foretold
from stepguard.records.look import Look

SATURATED = 1000.0
"""Largest logit from which on a softmax is one-hot in any precision."""
HARMLESS = 20.0
"""Below, growth is learning."""


def recognise(case: Case) -> Proof | None:
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
RULE = Rule(code="SG952", recognise=recognise)
