"""Ranks meet before they exchange anything: all of them enter a collective, or none does.

A collective that one rank never joins cannot be cancelled, and it may swallow a collective of the
user's. So each rank first leaves word in the key-value store of the process group, where waiting
has an end: the last one to come says "go", the first whose patience ends says who is missing.
Whichever is said first holds for all, also for a rank that comes later.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from stepguard.tensors.torch_private import default_store

GO = "go"
MOST_ASKED = 64
"""Ranks up to which each asks the store before every reduction; one process answers them all."""
REMEMBERED = 4096
"""Meetings whose names are remembered, so that one after a rewind gets another name."""
SHORTEST, LONGEST = 0.0005, 0.25
"""Seconds between two looks of a waiting rank; the longer it waits, the rarer it looks."""


class RankFault(RuntimeError):  # noqa: N818 (a fault of the guard, told to the other ranks)
    """The guard failed on one rank, so no rank can continue to guard."""


class RankAbsent(RankFault):
    """Not all ranks came to an exchange, so none entered it."""


class RankJoined(RankAbsent):
    """A rank has no data left (torch's Join), so the others decide without it."""


JOINED = "has no data left"


class Meeting:
    """Where the ranks of one guard meet. `name` is the same on all of them."""

    def __init__(self, name: str, members: Sequence[int], own: int, seconds: float) -> None:
        """`members` are the ranks as the user counts them, `own` is the one of this process."""
        self._name = name
        self._members = tuple(members)
        self._own = own
        self._seconds = seconds
        self._times: Counter[tuple[str, int]] = Counter()
        self.joining = False
        """This rank is inside torch's Join, in which ranks may run out of data."""
        self._over: list[str] = []
        """Keys of the last meeting, which every rank has read once all are at the next one."""

    def all_came(self, what: str, step: int, patience: float = 1.0) -> None:
        """Return when every rank is here; raise RankAbsent on all ranks if one is not in time."""
        # Named by step, so that a call that only one rank made does not shift all that follow.
        self._times[what, step] += 1
        if len(self._times) > REMEMBERED:
            del self._times[next(iter(self._times))]
        place = f"{self._name}/{what}/{step}/{self._times[what, step]}"
        store = default_store()
        word = f"{place}/word"
        store.set(f"{place}/{self._own}", "here")
        if store.add(f"{place}/count", 1) == len(self._members):
            store.compare_set(word, "", GO)
        seconds = self._seconds * patience
        self._wait(store, place, time.monotonic() + seconds)
        if not store.check([word]):
            store.compare_set(word, "", self._missing(store, place, seconds))
        said = store.get(word).decode()
        if said != GO:
            kind = RankJoined if JOINED in said else RankAbsent
            raise kind(f"{said} for {what} of step {step}")
        store.delete_key(f"{place}/{self._own}")
        if self._own == self._members[0]:
            for key in self._over:
                store.delete_key(key)
            self._over = [word, f"{place}/count"]

    def leave(self, why: str, *, for_good: bool = False) -> None:
        """Let nobody wait for this rank. `for_good`: it takes part in no reduction any more."""
        # The group, or the process that holds the store, may be gone: then nobody waits.
        with contextlib.suppress(Exception):
            store = default_store()
            store.set(f"{self._name}/left", f"rank {self._own} {why}, so it did not come")
            if for_good:
                store.set(f"{self._name}/closed", str(self._own))

    def no_data_left(self) -> None:
        """This rank only follows the collectives of the others from now on."""
        with contextlib.suppress(Exception):
            default_store().set(f"{self._name}/joined", str(self._own))

    def data_again(self) -> None:
        """All ranks have run out of data, and go on together."""
        self.joining = False
        with contextlib.suppress(Exception):
            default_store().delete_key(f"{self._name}/joined")

    def refuse_if_closed(self, step: int) -> None:
        """Raise RankAbsent if a rank has closed its guard: one question to the store."""
        if len(self._members) > MOST_ASKED:
            return
        store = default_store()
        if store.check([f"{self._name}/closed"]):
            rank = store.get(f"{self._name}/closed").decode()
            raise RankAbsent(f"rank {rank} has closed its guard before step {step}")

    def _wait(self, store: Any, place: str, deadline: float) -> None:
        """Until something is said, a rank has left for good, or time is up.

        Not by `store.wait`: a signal is handled only when that returns, and torch prints two lines
        when its time is up.
        """
        pause = SHORTEST
        while not store.check([f"{place}/word"]):
            if time.monotonic() >= deadline or self._somebody_left(store):
                return
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST)

    def _somebody_left(self, store: Any) -> bool:
        if store.check([f"{self._name}/left"]):
            return True
        return self.joining and bool(store.check([f"{self._name}/joined"]))

    def _missing(self, store: Any, place: str, seconds: float) -> str:
        left = f"{self._name}/left"
        if store.check([left]):
            said: str = store.get(left).decode()
            return said
        if self.joining and store.check([f"{self._name}/joined"]):
            return f"rank {store.get(f'{self._name}/joined').decode()} {JOINED}"
        missing = [str(rank) for rank in self._members if not store.check([f"{place}/{rank}"])]
        ranks = "rank" if len(missing) == 1 else "ranks"
        return f"{ranks} {', '.join(missing)} did not come within {seconds:g} s"
