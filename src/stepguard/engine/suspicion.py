"""A suspicious but finite step: what can be said of it, and with `anomalies="act"`, what can be proven.

By default none of the user's code is run again for it: only the optimizer's own numbers are read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stepguard.detect import judge
from stepguard.detect.anomalies import LASTING, Signs, weights_did_it
from stepguard.engine.context import Context
from stepguard.engine.recovery import Recovery
from stepguard.engine.updates import update_ratio
from stepguard.records import Reading, Verdict
from stepguard.state.replay import reevaluate
from stepguard.state.step import Step

TOLD_FOR = 64
"""Steps after a runaway loss was told as an incident in which a further one is only a line."""


class Suspicion:
    """Weighs the finite anomalies of one guard."""

    def __init__(self, context: Context, recovery: Recovery, *, clips_itself: bool) -> None:
        """`clips_itself`: the guard clips, so it knows how much of a gradient an update was made of."""
        self._context = context
        self._recovery = recovery
        self._clips_itself = clips_itself
        self._last = -1
        self._in_a_row = 0
        self._told_at: int | None = None

    def weigh(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        """A note, or an incident: a loss that runs away is told as one, and acted upon only where that is asked for."""
        context = self._context
        self._count(reading.step)
        if context.agreement.mode == "spread":
            # every rank sees its own loss only, and asking the others takes a collective that they do not join
            return reading, replace(verdict, severity="note")
        if verdict.kind == "spike":
            reading = replace(reading, update_ratio=self._update_ratio())
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

    def _update_ratio(self) -> float | None:
        """How large the last update was; the largest over the ranks, so that all judge alike."""
        context = self._context
        history = context.history
        if not history.rates:
            return None
        last_norm = self._last_used_norm()

        def measured() -> dict[str, Any]:
            return {"ratio": update_ratio(context.optimizer, history.rates[-1], last_norm)}

        told = [facts["ratio"] for facts in context.agreement.together(measured)]
        return max((ratio for ratio in told if ratio is not None), default=None)

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
        if proven.bad or not verdict.bad or self._told_lately(reading.step):
            return reading, proven
        self._told_at = reading.step
        return reading, verdict  # a runaway loss is told, whatever could be proven

    def _signs(self, step: Step, reading: Reading, verdict: Verdict) -> Signs:
        """What the user's own code says when it is run again; only where the loss itself asks for it."""
        signs = Signs(lasting=self._in_a_row)
        history = self._context.history
        loss = reading.judged_loss
        lost = loss is not None and history.best is not None and loss > history.ruin_limit
        asks = verdict.bad or (lost and self._in_a_row >= LASTING)
        if not asks or self._context.agreement.size > 1:
            return signs
        earlier = self.earlier_batch_now()
        if earlier is None or not step.whole:
            return replace(signs, moved=self._recovery.moved_since_good())
        own = self._recovery.on_its_own_weights()
        older = self._recovery.on_older_weights(step)
        return replace(
            signs,
            earlier_now=earlier[0],
            earlier_then=earlier[1],
            own_then=own[0] if own is not None else None,
            own_now=own[1] if own is not None else None,
            older_step=older[0] if older is not None else None,
            older_loss=older[1] if older is not None else None,
        )

    def earlier_batch_now(self) -> tuple[float, float] | None:
        """The loss of an earlier healthy batch on the present weights and when it was new; the worst over the ranks."""
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


def _rise(pair: tuple[float, float]) -> float:
    now, then = pair
    return now - then if math.isfinite(now) else math.inf
