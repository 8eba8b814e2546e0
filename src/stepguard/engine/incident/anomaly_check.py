"""Weigh a suspicious but finite step: what is told of it and what is proven.

By default none of the user's code is run again for it: only the optimizer's own numbers are read.
With `anomalies="act"` earlier steps are evaluated again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stepguard.detect import judge
from stepguard.detect.anomalies import worth_measuring
from stepguard.detect.weights_blame import LASTING, Signs, blame_weights
from stepguard.engine.context import Context
from stepguard.engine.incident.run_facts import update_ratio
from stepguard.engine.recover.earlier_weights import compare_with_best
from stepguard.engine.recover.rewind import Rewinder
from stepguard.records import Reading, Verdict
from stepguard.state.faked_collectives import CollectiveInReplayError
from stepguard.state.replay import reevaluate
from stepguard.state.step import Step

TOLD_FOR = 64
"""Steps after a runaway loss was told as an incident in which a further one is only a line."""


class AnomalyCheck:
    """Weighs the finite anomalies of one guard."""

    def __init__(self, context: Context, rewinder: Rewinder, *, clips_itself: bool) -> None:
        """`clips_itself`: the guard clips, so it knows the gradient an update was made of."""
        self._context = context
        self._rewinder = rewinder
        self._clips_itself = clips_itself
        self._last = -1
        self._in_a_row = 0
        self._told_at: int | None = None
        self.proven = False
        """The last incident may be acted upon: the signs agree that the weights are hurt."""

    def weigh(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        """Make it a note, or for a runaway loss an incident, acted upon only if asked."""
        context = self._context
        self.proven = False
        self._count(reading.step)
        if context.agreement.mode == "spread":
            # a rank sees its own loss only; asking the others takes a collective they do not join
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
        if step == self._last + 1:
            self._in_a_row += 1
        else:
            self._in_a_row = 1
        self._last = step

    def _told_lately(self, step: int) -> bool:
        return self._told_at is not None and 0 <= step - self._told_at < TOLD_FOR

    def _measured(self, reading: Reading) -> Reading:
        """Measure the last update and the way of the weights; the largest over the ranks."""
        told = self._context.agreement.in_step(self._measure, "the last update")
        return replace(
            reading, update_ratio=_largest(told, "ratio"), weights_moved=_largest(told, "moved")
        )

    def _measure(self) -> dict[str, Any]:
        rates = self._context.history.rates
        ratio = None
        if rates:
            ratio = update_ratio(self._context.optimizer, rates[-1], self._last_used_norm())
        return {"ratio": ratio, "moved": self._rewinder.probation.moved_since_good()}

    def _last_used_norm(self) -> float | None:
        """Norm of the gradient that the last update was made of, where clipping is known."""
        norms = self._context.history.norms
        if not norms or not self._clips_itself:
            return None
        return min(norms[-1], self._context.config.clip_norm or math.inf)

    def _prove(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        context = self._context
        signs = self._signs(step, reading, verdict)
        proven = blame_weights(verdict, reading, context.history, signs)
        reading = replace(reading, repeat_loss=signs.earlier_now, repeat_before=signs.earlier_then)
        self.proven = proven.bad
        if proven.bad or not verdict.bad or self._told_lately(reading.step):
            return reading, proven
        # a runaway loss is told, whatever could be proven
        self._told_at = reading.step
        return reading, verdict

    def _signs(self, step: Step, reading: Reading, verdict: Verdict) -> Signs:
        """Run the user's code again to compare losses, where the loss itself asks for it."""
        signs = Signs(lasting=self._in_a_row)
        asks = verdict.bad or self._lost_for_long(reading)
        if not asks or self._context.agreement.size > 1:
            return signs
        found = None
        if step.replayable:
            found = compare_with_best(self._context, self._rewinder.snapshots, step)
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

    def _lost_for_long(self, reading: Reading) -> bool:
        loss = reading.judged_loss
        history = self._context.history
        if loss is None or history.best is None or self._in_a_row < LASTING:
            return False
        return loss > history.ruin_limit

    def earlier_batch_now(self) -> tuple[float, float] | None:
        """Loss of an earlier healthy batch now and when it was new; the worst over the ranks."""
        told = self._context.agreement.in_step(self._run_anchor, "an earlier batch")
        known = [facts["again"] for facts in told if facts["again"] is not None]
        return max(known, key=_rise, default=None)

    def _run_anchor(self) -> dict[str, Any]:
        anchor = self._context.anchor
        if anchor is None:
            return {"again": None}
        step, then = anchor
        try:
            now = reevaluate(step)
        except CollectiveInReplayError:
            return {"again": None}
        if self._context.maximizes:
            now = -now
        return {"again": (now, then)}


def _largest(told: list[dict[str, Any]], name: str) -> float | None:
    known = [facts[name] for facts in told if facts[name] is not None]
    return max(known, default=None)


def _rise(pair: tuple[float, float]) -> float:
    now, then = pair
    if not math.isfinite(now):
        return math.inf
    return now - then
