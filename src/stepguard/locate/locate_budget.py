"""How long placing an incident may take: a budget in steps of the bare run. Then what is known is
told.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from statistics import median

FLOOR = 0.3
"""Seconds that are always allowed: where steps are short, six of them are nothing."""
RECENT = 16
"""Steps whose times stand for a bare step."""
MOST_FRUITLESS = 3
"""Searches that may end without a sample before one place is no longer searched for samples."""
TRACING_STEPS, TRACING_FLOOR = 20.0, 5.0
"""What tracing a loop may add: so many times the budget of placing one incident, and at least so
many seconds.
"""


class OutOfTimeError(Exception):
    """What would come next does not fit into the budget."""


class LocateBudget:
    """The budget of one guard's incidents, and what earlier ones have shown to be in vain."""

    def __init__(self, steps: float = 6.0, clock: Callable[[], float] | None = None) -> None:
        self.steps = steps
        self.tracing = False
        """The loop runs under the tracer, so its steps are not bare."""
        self._added_by_tracing = 0.0
        self.cut: list[str] = []
        """What was left out of the present incident, in sentences."""
        self.whole_only: set[Hashable] = set()
        """Kinds of batches that the user's code takes whole or not at all."""
        self._fruitless: Counter[Hashable] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._given_clock = clock
        self._clock = clock or time.perf_counter
        self._began = 0.0
        self._traced: float | None = None

    def took(self, seconds: float) -> None:
        """A step of the loop took this long."""
        if self.tracing:
            self._added_by_tracing += max(seconds - self.bare_seconds, 0.0)
        else:
            self._recent.append(seconds)

    def begin_tracing(self) -> None:
        """The loop is to be traced from now on."""
        self._added_by_tracing = 0.0

    @property
    def tracing_too_long(self) -> bool:
        """Has tracing added more time than it may?"""
        return self._added_by_tracing > max(TRACING_FLOOR, self.tracing_limit * self.bare_seconds)

    @property
    def tracing_limit(self) -> float:
        """Bare steps that tracing may add."""
        return TRACING_STEPS * self.steps

    @property
    def bare_seconds(self) -> float:
        """A step of the bare run; never more than the traced one, which does the same and looks at
        it.
        """
        known = [median(self._recent)] if self._recent else []
        if self._traced is not None:
            known.append(self._traced)
        return min(known, default=0.0)

    def begin(self, *, on_host: bool) -> None:
        """A new incident. On the host the time of this thread counts, so that a busy machine
        changes no answer.
        """
        self._clock = self._given_clock or (time.thread_time if on_host else time.perf_counter)
        self._began, self._traced, self.cut = self._clock(), None, []

    @contextmanager
    def first_trace(self) -> Iterator[None]:
        """The one run without which nothing is known is not charged."""
        began = self._clock()
        yield
        took = self._clock() - began
        if self._traced is None:
            self._traced = took
            self._began += took

    def affords(self, steps: float) -> bool:
        """Is there time for so many more runs of the step?"""
        limit = max(FLOOR, self.steps * self.bare_seconds)
        return self._clock() - self._began + steps * self.bare_seconds <= limit

    def require(self, steps: float) -> None:
        """Raises OutOfTimeError where there is no time for so many more runs of the step."""
        if not self.affords(steps):
            raise OutOfTimeError

    def leave_out(self, what: str) -> None:
        """Say what the budget did not allow."""
        self.cut.append(
            f"cut short: {what} would take more than {self.steps:g} bare steps (locate_budget)"
        )

    def in_vain(self, place: Hashable) -> bool:
        """Has the search for samples found none at this place several times?"""
        return self._fruitless[place] >= MOST_FRUITLESS

    def searched(self, place: Hashable, *, found: bool) -> None:
        self._fruitless[place] = 0 if found else self._fruitless[place] + 1
