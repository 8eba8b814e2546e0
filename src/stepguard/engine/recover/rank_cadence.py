"""When the ranks of a run take their snapshots: all at the same steps, by the first rank's clock.

A rewind needs a snapshot of one step on every rank. Ranks that followed their own clocks would keep
the newest few of different grids, and have none in common.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from stepguard.sentinel.rank_agreement import Agreement
from stepguard.state.snapshot import Cadence

REVISED = 64
"""Steps between two moments at which the grid may change."""
KEPT = 8
"""Changes that stay in the store: a rewind may pass them again."""


def cadence_of(
    agreement: Agreement,
    every: int | Literal["auto"],
    clock: Callable[[], float] = time.perf_counter,
) -> Cadence:
    """The cadence of a guard, alone or among ranks."""
    if agreement.mode == "alone" or every != "auto":
        return Cadence(every, clock)
    return RankCadence(agreement, clock)


class RankCadence(Cadence):
    """The first rank's grid, on every rank.

    It leaves each change in the store for a later step, and every rank asks when it comes there.
    Nobody waits: a rank gets to a step only with the first rank's gradients of the step before,
    which were made after the change was told.
    """

    def __init__(
        self, agreement: Agreement, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__("auto", clock)
        self._agreement = agreement
        self._agreed = self.GRID
        self._said = self.GRID
        self._asked = -1
        self._told: deque[str] = deque()

    def due(self, step: int) -> bool:
        if step > 0 and step % REVISED == 0 and step != self._asked:
            self._asked = step
            told = self._agreement.told(_change_at(step))
            if told:
                self._agreed = int(told)
        self._width = self._agreed
        return super().due(step)

    def took(self, step: int, seconds: float) -> None:
        super().took(step, seconds)
        wanted = self._width
        self._width = self._agreed
        if self._agreement.rank == 0 and wanted != self._said:
            self._said = wanted
            self._tell(_change_at((step // REVISED + 1) * REVISED), wanted)

    def rewound(self, step: int) -> None:
        super().rewound(step)
        self._asked = -1

    def _tell(self, about: str, width: int) -> None:
        self._agreement.tell(about, str(width))
        self._told.append(about)
        if len(self._told) > KEPT:
            self._agreement.tell(self._told.popleft(), "")


def _change_at(step: int) -> str:
    return f"snapshots every/{step}"
