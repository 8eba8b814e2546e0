"""Has a run lost what it learned? Its loss says so first, and its weights must confirm it.

A new task, a policy or a generator raises the loss as much, on weights that move as they always
did. Asked where a state is to be called good, never on a healthy step.
"""

from __future__ import annotations

from collections.abc import Callable

from stepguard.detect.anomalies import MOVED
from stepguard.engine.context import Context
from stepguard.engine.incident.update_facts import update_ratio

LARGE_STEP = 0.1
"""Of the norm of the weights, in one update: a hundred times what is usual."""


class Ruin:
    """The confirmed loss of what one run had learned."""

    def __init__(self, context: Context, moved: Callable[[], float | None]) -> None:
        """`moved` tells how far the weights are from a recent good state, over their norm."""
        self._context = context
        self._moved = moved
        self._confirmed_at: int | None = None

    def confirmed(self) -> bool:
        """Is the level lost, and did the weights do it?"""
        context = self._context
        began = context.history.ruined_at
        if context.config.anomalies == "off" or began is None:
            self._confirmed_at = None
            return False
        if self._confirmed_at != began and self._weights_left():
            self._confirmed_at = began
        return self._confirmed_at == began

    def _weights_left(self) -> bool:
        history = self._context.history
        if history.level > history.far_limit:
            return True  # no task is a hundred times as hard as the first one was
        rates = history.rates
        ratio = update_ratio(self._context.optimizer, rates[-1]) if rates else None
        if ratio is not None and ratio >= LARGE_STEP:
            return True
        moved = self._moved()
        return moved is not None and not moved < MOVED
