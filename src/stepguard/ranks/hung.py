"""Ranks that do not come: who is behind where a step takes too long, and where all stop."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Protocol

from stepguard.locate.source import is_users
from stepguard.ranks.agreement import Agreement
from stepguard.tensors.torch_private import default_store


class Noting(Protocol):
    """Where notes go."""

    def note(self, kind: str, text: str) -> None: ...


class Stepping(Protocol):
    """How far this rank is."""

    agreement: Agreement
    step: int

    @property
    def place(self) -> tuple[int, int]: ...
    @property
    def outputs(self) -> Noting: ...


# --- Name the rank that has not come, where a step of several ranks takes too long.


LOOKS = 4
"""Looks in the time after which a rank counts as hung."""
SILENT = 3
"""Looks without a word after which a process counts as dead or frozen."""
TELLERS = 2
"""Ranks that read the others' places: the first may be the one that hangs."""
MOST_NAMED = 8
HANGS_AFTER = 5
"""Times `Ranks.timeout` without progress."""


class RankProgress(NamedTuple):
    """Where a rank was when it last wrote it down."""

    step: int
    marks: int
    """Backward passes and updates of this step that it had come to."""
    at: float
    """When, in seconds since the epoch."""
    line: str
    """The user's line that its loop was in."""


class HungRank:
    """Watches over one guard from a thread of its own."""

    def __init__(self, context: Stepping, after: float) -> None:
        # a thread that held the model would keep its process group alive past its end
        self._context = weakref.ref(context)
        self._name = f"stepguard/places/{context.agreement.name}"
        self._after = after
        self._loop = threading.get_ident()
        self._stop = threading.Event()
        self._last: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._told: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._watch, name="stepguard-hung-rank", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._after / LOOKS):
            context = self._context()
            if context is None:
                return
            # the store may be gone at the end of a run; nothing here is worth an error
            with contextlib.suppress(Exception):
                self.look(context)
            del context

    def look(self, context: Stepping) -> None:
        """Write down where this rank is; if it has not moved for too long, tell who is behind."""
        place = context.place
        if place != self._last:
            self._last = place
            self._since = time.monotonic()
        own = RankProgress(*place, time.time(), self._line())
        default_store().set(f"{self._name}/{context.agreement.world_rank}", json.dumps(own))
        waited = time.monotonic() - self._since
        if waited < self._after or self._told == place or context.agreement.rank >= TELLERS:
            return
        self._told = place
        store = default_store()
        places: dict[int, RankProgress] = {}
        for rank in context.agreement.members:
            key = f"{self._name}/{rank}"
            if store.check([key]):
                places[rank] = RankProgress(*json.loads(store.get(key)))
        words = behind(places, time.time() - SILENT * self._after / LOOKS)
        if words:
            context.outputs.note("hang", f"no progress for {waited:.0f} s: {words}")

    def _line(self) -> str:
        """The innermost line of the user's that the loop is in."""
        frame: FrameType | None = sys._current_frames().get(self._loop)
        while frame is not None:
            file = frame.f_code.co_filename
            if is_users(file) and "site-packages" not in file:
                return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return ""


def behind(places: dict[int, RankProgress], heard_after: float) -> str:
    """Say which ranks are behind the others, and which have said nothing since `heard_after`."""
    furthest = max((place[:2] for place in places.values()), default=(0, 0))
    words: list[str] = []
    for rank, place in places.items():
        if place.at < heard_after:
            words.append(f"rank {rank} has not reported since step {place.step}: dead or frozen")
        elif place[:2] < furthest:
            where = f", in {place.line}" if place.line else ""
            words.append(f"rank {rank} is behind the others{where}")
    if len(words) > MOST_NAMED:
        words = [*words[:MOST_NAMED], f"and {len(words) - MOST_NAMED} more"]
    return "; ".join(words)


# --- At which step all ranks stop, for a signal that perhaps only one of them has got.


BETWEEN = 1.0
"""Seconds between two looks, about."""
MOST = 4096
"""Steps between two looks."""


class AgreedStop:
    """One guard's part of it. Everything is asked between two steps."""

    def __init__(
        self,
        context: Stepping,
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
        """On rank 0, publish the interval between the next poll and the one after it."""
        if self._context.agreement.rank == 0:
            place = f"{self._name}/look/{self._number % 2}"
            now = self._clock()
            step = self._context.step
            before = self._looked
            self._looked = (now, step)
            if before is None or step <= before[1]:
                wanted_width = 1
            else:
                seconds = (now - before[0]) / (step - before[1])
                wanted_width = min(MOST, max(1, int(BETWEEN / max(seconds, 1e-9))))
            store.set(place, f"{self._look} {wanted_width}")

    def _ask_store(self, question: Callable[[Any], None]) -> None:
        try:
            question(self._store())
        except Exception:
            # the group, or the process that holds the store, is gone
            self.lost = True


def _pair(said: bytes) -> tuple[int, int]:
    first, second = said.decode().split()
    return int(first), int(second)
