"""Limit the time that locating an incident may take, in steps of the bare run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from statistics import median

FLOOR = 0.3
"""Seconds that are always allowed: where steps are short, six of them are next to nothing."""
RECENT = 16
"""Steps whose times stand for a bare step."""
MOST_FRUITLESS = 3
"""Searches that may end without a sample before one place is no longer searched for samples."""
TRACING_STEPS = 20.0
"""Tracing a loop may add this many times the budget of locating one incident."""
TRACING_FLOOR = 5.0
"""Seconds that tracing may add in any case."""


class OutOfTimeError(Exception):
    """The next replay does not fit into the budget."""


class LocateBudget:
    """The budget of one guard's incidents, and which searches were in vain in earlier ones."""

    def __init__(self, steps: float = 6.0, clock: Callable[[], float] | None = None) -> None:
        self.steps = steps
        self.tracing = False
        """The loop runs under the tracer, so its steps are not bare."""
        self.cut: list[str] = []
        """What was left out of the present incident, in sentences."""
        self.whole_only: set[Hashable] = set()
        """Kinds of batches that the user's code takes whole or not at all."""
        self._added_by_tracing = 0.0
        self._fruitless: Counter[Hashable] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._given_clock = clock
        self._clock = clock or time.perf_counter
        self._began = 0.0
        self._traced: float | None = None

    def took(self, seconds: float) -> None:
        """Note how long a step of the loop took."""
        if self.tracing:
            self._added_by_tracing += max(seconds - self.bare_seconds, 0.0)
        else:
            self._recent.append(seconds)

    def begin_tracing(self) -> None:
        """Start to count what tracing the loop adds."""
        self._added_by_tracing = 0.0

    @property
    def tracing_too_long(self) -> bool:
        """True if tracing has added more time than it may."""
        return self._added_by_tracing > max(TRACING_FLOOR, self.tracing_limit * self.bare_seconds)

    @property
    def tracing_limit(self) -> float:
        """Bare steps that tracing may add."""
        return TRACING_STEPS * self.steps

    @property
    def bare_seconds(self) -> float:
        """Seconds of a step of the bare run; 0 if unknown."""
        known = []
        if self._recent:
            known.append(median(self._recent))
        # The traced step does the same and more, so it is an upper bound.
        if self._traced is not None:
            known.append(self._traced)
        return min(known, default=0.0)

    def begin(self, *, on_host: bool) -> None:
        """Start a new incident. `on_host`: the model runs on the CPU."""
        if self._given_clock is None:
            self._clock = clock_for(on_host=on_host)
        self._began = self._clock()
        self._traced = None
        self.cut = []

    @contextmanager
    def first_trace(self) -> Iterator[None]:
        """Leave the first traced run out of the budget: without it nothing is known at all."""
        began = self._clock()
        yield
        took = self._clock() - began
        if self._traced is None:
            self._traced = took
            self._began += took

    def affords(self, steps: float) -> bool:
        """True if there is time for this many more runs of the step."""
        limit = max(FLOOR, self.steps * self.bare_seconds)
        return self._clock() - self._began + steps * self.bare_seconds <= limit

    def require(self, steps: float) -> None:
        """Raise OutOfTimeError if there is no time for this many more runs of the step."""
        if not self.affords(steps):
            raise OutOfTimeError

    def leave_out(self, what: str) -> None:
        """Say what the budget did not allow."""
        self.cut.append(
            f"cut short: {what} would take more than {self.steps:g} bare steps (locate_budget)"
        )

    def in_vain(self, place: Hashable) -> bool:
        """True if the search for samples has found none at this place several times."""
        return self._fruitless[place] >= MOST_FRUITLESS

    def searched(self, place: Hashable, *, found: bool) -> None:
        """Note whether a search for samples at this place found any."""
        if found:
            self._fruitless[place] = 0
        else:
            self._fruitless[place] += 1


def clock_for(*, on_host: bool) -> Callable[[], float]:
    """Choose the clock that a budget is measured with."""
    # On the CPU the time of this thread counts, so that a busy machine changes no answer. On a
    # device the thread only waits.
    if on_host:
        return time.thread_time
    return time.perf_counter
