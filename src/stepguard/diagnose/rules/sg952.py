"""SG952: attention logits that grow."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.diagnose.ahead import log2, soonest, when
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.records.look import Look

SATURATED = 1000.0
"""Largest logit from which on a softmax is one-hot in any precision."""
HARMLESS = 20.0
"""Below, growth is learning."""


def recognise(case: Case) -> Proof | None:
    found = soonest(case.looks, _logits, lambda name: math.log2(SATURATED), rising=True)
    if found is None:
        return None
    module, points, ahead = found
    if 2 ** points[-1][1] < HARMLESS:
        return None
    return likely(
        f"the largest attention logit of {module or 'the model'} grew from {2 ** points[0][1]:.3g} "
        f"at step {points[0][0]} to {2 ** points[-1][1]:.3g} at step {points[-1][0]}; it passes "
        f"{SATURATED:g} {when(ahead)}, and attention looks at one key only"
    )


def _logits(look: Look) -> Iterable[tuple[str, float | None]]:
    return [(one.module, log2(one.largest_logit)) for one in look.attention]


RULE = Rule(code="SG952", recognise=recognise)
