"""At which steps a deep look is due: early ones within the first minutes, then ever fewer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

SHARE = 0.001
"""Share of the run's time that looks may take, after the first minutes."""
SAVED = 0.0005
"""Part of that share that is saved for the time when a trend begins to show."""
EARLY_SHARE = 0.01
EARLY_SECONDS = 300.0
"""In the first minutes a look is worth more: what is wrong with a setup is wrong from the start."""
LEAST_SECONDS = 120.0
"""A run is expected to last at least this long, so its first looks need not wait for the time."""
GROWTH = 0.05
"""A look is at least this share of all steps so far after the last one: ever more rarely."""
EARLY_GAPS = ((64, 5), (256, 16))
"""Up to which step looks are at most how far apart; after that at powers of two."""
HURRY_STEPS = 4
"""Steps between two looks while a trend shows."""
FIRST = 2
"""Step of the first look: what torch.compile compiles has been compiled by then, and is left alone.
"""


class LookSchedule:
    """Says at which steps a look is due."""

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every = every
        self._clock = clock
        self._began: float | None = None
        self._spent = 0.0
        self._cost = 0.0
        """Of the last look."""
        self._last: int | None = None
        """The step of the last look."""
        self._offset: int | None = None
        """The first step that was asked for."""
        self.hurry = False
        """A trend begins to show: spend what was saved for this."""
        self._asked = 0.0
        """When the schedule was last asked: that is once a step."""
        self._usual = 0.0
        """Time of the newest step without a look."""
        self._unsettled = False
        """The last look has cost what it says, and perhaps more."""

    def due(self, step: int) -> bool:
        """True if this step is to be looked at."""
        if self._every is None:
            return False
        if self._began is None:
            self._began = self._clock()
        self._settle()
        if self._last is None:
            # counted from where this process began: a restored run compiles again
            self._offset = step if self._offset is None else self._offset
            return step >= self._offset + FIRST
        if self._every != "auto":
            return step - self._last >= self._every
        elapsed = self._clock() - self._began
        early = EARLY_SHARE * min(max(elapsed, LEAST_SECONDS), EARLY_SECONDS)
        allowed = early + SHARE * max(0.0, elapsed - EARLY_SECONDS)
        offset = self._offset or 0
        if self.hurry:
            wanted = step - self._last >= HURRY_STEPS
        else:
            # ever more rarely; between these what the long run's share allows
            age = self._last - offset
            gap = next((gap for until, gap in EARLY_GAPS if age < until), age)
            wanted = step - self._last >= min(gap, age)
            if not wanted and step >= self._last + max(1.0, GROWTH * step):
                wanted = True
                allowed = (SHARE - SAVED) * elapsed
        return wanted and self._spent + self._cost <= allowed

    def _settle(self) -> None:
        """Charge a look with what its step took beyond the usual, which it sees only a part of.

        At most as much again: a validation after the step is not the look's.
        """
        now = self._clock()
        took = now - self._asked
        self._asked = now
        if not self._unsettled:
            self._usual = took
            return
        self._unsettled = False
        unseen = min(max(0.0, took - self._usual - self._cost), self._cost)
        self._spent += unseen
        self._cost += unseen

    def stop(self) -> None:
        """No further look."""
        self._every = None

    def took(self, step: int, seconds: float) -> None:
        """A look has been taken."""
        # the first one is always allowed: what it tells of the setup comes too late otherwise
        if self._last is not None:
            self._spent += seconds
        self._last = step
        self._cost = seconds
        self._unsettled = True
