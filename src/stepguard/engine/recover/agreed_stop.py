"""At which step all ranks stop, for a signal that perhaps only one of them has got.

Ranks under DDP exchange nothing in a healthy step, so the word goes through the key-value store of
the process group. About once a second every rank looks there, before the same step: the first rank
says one look ahead how many steps lie between two. A rank with a signal names the next look that
lies ahead as the step to stop at. No rank has passed it, because no rank can finish a step that
another has not begun, and by then every rank can read it, for the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stepguard.engine.context import Context
from stepguard.tensors.torch_private import default_store

BETWEEN = 1.0
"""Seconds between two looks, about."""
MOST = 4096
"""Steps between two looks."""


class AgreedStop:
    """One guard's part of it. Everything is asked between two steps."""

    def __init__(
        self,
        context: Context,
        *,
        store: Callable[[], Any] = default_store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._store = store
        self._clock = clock
        self._name = f"{context.agreement.name}/stop"
        self._look = -1
        """The step before which this rank looks next."""
        self._number = 0
        """How many looks there were."""
        self._width = 1
        """Steps from that look to the one after."""
        self._looked: tuple[float, int] | None = None
        """When the last look was, and before which step."""
        self._stop: tuple[int, int] | None = None
        """The step to stop at, and the signal; known once this rank has asked for it or read it."""
        self.lost = False
        """The store cannot be reached: every rank acts for itself."""

    def ask(self, number: int) -> None:
        """This rank has got a signal: have all ranks stop at the next look that lies ahead."""
        if self._stop is None and not self.lost and self._look >= 0:
            ahead = self._look
            # not the very next step: a loop may show the end of its step to one rank only after
            # the gradients are reduced, and to another before
            if ahead < self._context.step + 2:
                ahead += self._width
            self._ask_store(lambda store: self._propose(store, ahead, number))

    def reached(self) -> int | None:
        """The signal to act upon before this very step; None to go on. Called before every step."""
        if self.lost:
            return None
        step = self._context.step
        if self._look < 0:
            self._ask_store(self._begin)
        elif step >= self._look:
            self._ask_store(self._read)
        if self._stop is None or step < self._stop[0]:
            return None
        return self._stop[1]

    def _propose(self, store: Any, step: int, number: int) -> None:
        said = store.compare_set(f"{self._name}/at", "", f"{step} {number}")
        self._stop = _pair(said)

    def _begin(self, store: Any) -> None:
        self._context.agreement.begin()
        self._look = self._context.step + 1
        self._publish(store)

    def _read(self, store: Any) -> None:
        """Look: is there a step to stop at, and when is the look after the next?"""
        if store.check([f"{self._name}/at"]):
            self._stop = _pair(store.get(f"{self._name}/at"))
        place = f"{self._name}/look/{self._number % 2}"
        at, width = _pair(store.get(place)) if store.check([place]) else (-1, 1)
        if at != self._look:
            # ranks that do not keep step with each other cannot agree on one
            self.lost = True
            return
        self._number += 1
        self._look = max(self._look, self._context.step) + self._width
        self._width = width
        self._publish(store)

    def _publish(self, store: Any) -> None:
        """As the first rank: say before the next look how far it is from there to the one after."""
        if self._context.agreement.rank == 0:
            place = f"{self._name}/look/{self._number % 2}"
            store.set(place, f"{self._look} {self._wanted_width()}")

    def _wanted_width(self) -> int:
        now = self._clock()
        step = self._context.step
        before = self._looked
        self._looked = (now, step)
        if before is None or step <= before[1]:
            return 1
        seconds = (now - before[0]) / (step - before[1])
        return min(MOST, max(1, int(BETWEEN / max(seconds, 1e-9))))

    def _ask_store(self, question: Callable[[Any], None]) -> None:
        try:
            question(self._store())
        except Exception:
            # the group, or the process that holds the store, is gone
            self.lost = True


def _pair(said: bytes) -> tuple[int, int]:
    first, second = said.decode().split()
    return int(first), int(second)
