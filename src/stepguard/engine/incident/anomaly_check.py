"""A suspicious but finite step: what can be said of it, and with `anomalies="act"`, what can be
proven.

By default none of the user's code is run again for it: only the optimizer's own numbers are read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stepguard.detect import judge
from stepguard.detect.anomalies import LASTING, Signs, weights_did_it, worth_measuring
from stepguard.engine.context import Context
from stepguard.engine.incident.update_facts import update_ratio
from stepguard.engine.recover.snapshots import Recovery
from stepguard.records import Reading, Verdict
from stepguard.state.replay import reevaluate
from stepguard.state.step import Step

TOLD_FOR = 64
"""Steps after a runaway loss was told as an incident in which a further one is only a line."""


class Suspicion:
    """Weighs the finite anomalies of one guard."""

    def __init__(self, context: Context, recovery: Recovery, *, clips_itself: bool) -> None:
        """`clips_itself`: the guard clips, so it knows how much of a gradient an update was made
        of.
        """
        self._context = context
        self._recovery = recovery
        self._clips_itself = clips_itself
        self._last = -1
        self._in_a_row = 0
        self._told_at: int | None = None
        self.proven = False
        """The last incident may be acted upon: the signs agree that the weights are hurt."""

    def weigh(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        """A note, or an incident: a loss that runs away is told as one, and acted upon only where
        that is asked for.
        """
        context = self._context
        self.proven = False
        self._count(reading.step)
        if context.agreement.mode == "spread":
            # every rank sees its own loss only, and asking the others takes a collective that they
            # do not join
            return reading, replace(verdict, severity="note")
        if worth_measuring(reading, context.history):
            reading = self._measured(reading)
            verdict = judge(reading, context.history, context.config)
        if context.config.anomalies == "act":
            return self._prove(step, reading, verdict)
        if verdict.bad and not self._told_lately(reading.step):
            self._told_at = reading.step
            return reading, verdict
        return reading, replace(verdict, severity="note")

    def _count(self, step: int) -> None:
        follows = step == self._last + 1
        self._in_a_row = self._in_a_row + 1 if follows else 1
        self._last = step

    def _told_lately(self, step: int) -> bool:
        return self._told_at is not None and 0 <= step - self._told_at < TOLD_FOR

    def _measured(self, reading: Reading) -> Reading:
        """How large the last update was and how far the weights have come; the largest over the
        ranks.
        """
        told = self._context.agreement.together(self._measure)
        return replace(
            reading, update_ratio=_largest(told, "ratio"), weights_moved=_largest(told, "moved")
        )

    def _measure(self) -> dict[str, Any]:
        context = self._context
        rates = context.history.rates
        ratio = (
            update_ratio(context.optimizer, rates[-1], self._last_used_norm()) if rates else None
        )
        return {"ratio": ratio, "moved": self._recovery.moved_since_good()}

    def _last_used_norm(self) -> float | None:
        """Norm of the gradient that the last update was made of, where clipping is known."""
        norms = self._context.history.norms
        if not norms or not self._clips_itself:
            return None
        return min(norms[-1], self._context.config.clip_norm or math.inf)

    def _prove(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        context = self._context
        signs = self._signs(step, reading, verdict)
        proven = weights_did_it(verdict, reading, context.history, signs)
        reading = replace(reading, repeat_loss=signs.earlier_now, repeat_before=signs.earlier_then)
        self.proven = proven.bad
        if proven.bad or not verdict.bad or self._told_lately(reading.step):
            return reading, proven
        self._told_at = reading.step
        return reading, verdict  # a runaway loss is told, whatever could be proven

    def _signs(self, step: Step, reading: Reading, verdict: Verdict) -> Signs:
        """What the user's own code says when it is run again; only where the loss itself asks for
        it.
        """
        signs = Signs(lasting=self._in_a_row)
        history = self._context.history
        loss = reading.judged_loss
        lost = loss is not None and history.best is not None and loss > history.ruin_limit
        asks = verdict.bad or (lost and self._in_a_row >= LASTING)
        if not asks or self._context.agreement.size > 1:
            return signs
        found = self._recovery.compared_with_best(step) if step.replayable else None
        if found is None:
            return replace(signs, moved=reading.weights_moved)
        return replace(
            signs,
            earlier_then=found.then,
            earlier_now=found.now,
            own_then=found.then,
            own_now=found.again,
            older_step=found.step,
            older_loss=found.this_then,
        )

    def earlier_batch_now(self) -> tuple[float, float] | None:
        """The loss of an earlier healthy batch on the present weights and when it was new; the
        worst over the ranks.
        """
        context = self._context
        anchor = context.anchor
        sign = -1.0 if context.climbs else 1.0

        def again() -> dict[str, Any]:
            if anchor is None:
                return {"again": None}
            return {"again": (sign * reevaluate(anchor[0]), anchor[1])}

        told = [facts["again"] for facts in context.agreement.together(again)]
        known = [pair for pair in told if pair is not None]
        return max(known, key=_rise, default=None)


def _largest(told: list[dict[str, Any]], name: str) -> float | None:
    return max((facts[name] for facts in told if facts[name] is not None), default=None)


def _rise(pair: tuple[float, float]) -> float:
    now, then = pair
    return now - then if math.isfinite(now) else math.inf
