"""Name the rank that has not come, where a step of several ranks takes too long.

The main thread of a rank that waits in a collective runs no Python, so a thread watches over it.
Each rank's thread writes down rarely where its rank is: one line in the store of the process group.
When a rank has not moved for `GuardConfig.hang_after`, the first two ranks read what all have
written. Ranks that are all at the same place (an evaluation, say) are nothing to tell.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from types import FrameType
from typing import NamedTuple

from stepguard.engine.context import Context
from stepguard.locate.source import is_users
from stepguard.tensors.torch_private import default_store

LOOKS = 4
"""Looks in the time after which a rank counts as hung."""
SILENT = 3
"""Looks without a word after which a process counts as dead or frozen."""
TELLERS = 2
"""Ranks that read the others' places: the first may be the one that hangs."""
MOST_NAMED = 8


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

    def __init__(self, context: Context, after: float) -> None:
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

    def look(self, context: Context) -> None:
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
        words = behind(self._places(context), time.time() - SILENT * self._after / LOOKS)
        if words:
            context.outputs.note("hang", f"nothing has moved for {waited:.0f} s: {words}")

    def _places(self, context: Context) -> dict[int, RankProgress]:
        store = default_store()
        found: dict[int, RankProgress] = {}
        for rank in context.agreement.members:
            key = f"{self._name}/{rank}"
            if store.check([key]):
                found[rank] = RankProgress(*json.loads(store.get(key)))
        return found

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
            words.append(f"rank {rank} has said nothing since step {place.step}: dead or frozen")
        elif place[:2] < furthest:
            where = f", in {place.line}" if place.line else ""
            words.append(f"rank {rank} has not come as far as the others{where}")
    if len(words) > MOST_NAMED:
        words = [*words[:MOST_NAMED], f"and {len(words) - MOST_NAMED} ranks more"]
    return "; ".join(words)


def watch_for_hung_rank(context: Context) -> None:
    """Start to watch, where there are several ranks and it is asked for."""
    after = context.config.hang_after
    if context.agreement.size > 1 and after is not None:
        context.resources.callback(HungRank(context, after).close)
