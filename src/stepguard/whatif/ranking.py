"""Order the outcomes: what works first, then what ends lower, then what changes training less."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from stepguard.records.whatif import TrialOutcome

NOISE_SHARE = 0.02
"""Losses that differ by less than this share are equal."""
NOISE_OF_BATCHES = 0.25
"""So are those that differ by less than this part of what batches of the run differ by."""


def ranked(
    outcomes: Sequence[TrialOutcome], recorded: Sequence[float], healthy: float | None = None
) -> list[TrialOutcome]:
    """Return the best first.

    `recorded`: losses of the run on the way to the bad step. `healthy`: the loss of the good state
    that all trials began with; who ends no higher has lost nothing, however low others end.
    """
    working = [outcome for outcome in outcomes if outcome.works]
    failing = [outcome for outcome in outcomes if not outcome.works]
    order: list[TrialOutcome] = []
    noise = _noise_of_batches(recorded)
    while working:
        equal = _equal_to_best(working, noise, healthy)
        order += sorted(equal, key=lambda outcome: outcome.cost)
        working = [outcome for outcome in working if outcome not in equal]
    return order + sorted(failing, key=_longest_first)


def no_worse(one: TrialOutcome, other: TrialOutcome) -> bool:
    """Does it end at a loss that is not clearly higher?"""
    mine = _loss(one)
    theirs = _loss(other)
    if mine is None or theirs is None:
        return True
    return mine <= theirs + NOISE_SHARE * abs(theirs)


def _equal_to_best(
    working: Sequence[TrialOutcome], noise: float, healthy: float | None
) -> list[TrialOutcome]:
    """Those that lost nothing, or end where the best does, as far as so few batches can tell."""
    losses = [loss for outcome in working if (loss := _loss(outcome)) is not None]
    if not losses:
        return list(working)
    best = min(losses)
    if healthy is not None and math.isfinite(healthy):
        best = max(best, healthy)
    limit = best + max(NOISE_SHARE * abs(best), noise)
    return [outcome for outcome in working if _at_most(_loss(outcome), limit)]


def _at_most(loss: float | None, limit: float) -> bool:
    return loss is None or loss <= limit


def _loss(outcome: TrialOutcome) -> float | None:
    return judged_by(outcome.loss, outcome.held_out)


def judged_by(loss: float | None, held_out: float | None) -> float | None:
    """What counts: batches that were not trained on, where there are any."""
    return loss if held_out is None else held_out


def _noise_of_batches(recorded: Sequence[float]) -> float:
    """How much losses of neighbouring steps differ, without the trend of the run."""
    finite = [loss for loss in recorded if math.isfinite(loss)]
    if len(finite) < 3:
        return 0.0
    steps = [abs(later - earlier) for earlier, later in pairwise(finite)]
    return NOISE_OF_BATCHES * statistics.median(steps)


def _longest_first(outcome: TrialOutcome) -> tuple[bool, int, int]:
    """Of those that fail, the one that got furthest, then the cheapest."""
    return bool(outcome.why_not), -len(outcome.losses), outcome.cost
