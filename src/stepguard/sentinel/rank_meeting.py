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
        self.began = False
        """This rank has begun its first step."""
        self._over: list[str] = []
        """Keys of the last meeting, which every rank has read once all are at the next one."""
        self.solo = False
        """The other ranks have no such guard: nothing of it is left in the store."""
        self._gave_up: list[str] = []
        """Keys under which this rank has said that it failed."""

    def all_came(
        self, what: str, step: int, patience: float = 1.0, *, whatever_failed: bool = False
    ) -> None:
        """Return when every rank is here; raise RankAbsent on all ranks if one is not in time.

        `whatever_failed`: a rank that has given up in this step comes, too.
        """
        place = f"{self._name}/{self.arrive(what, step)}"
        store = default_store()
        word = f"{place}/word"
        store.set(f"{place}/{self._own}", "here")
        if store.add(f"{place}/count", 1) == len(self._members):
            store.compare_set(word, "", GO)
        seconds = self._seconds * patience
        ended = [f"{self._name}/left"]
        if not self.began:
            ended.append(f"{self._name}/began")
        if self.joining:
            ended.append(self._joined)
        if not whatever_failed:
            ended.append(self._given_up(step))
        self._wait(store, word, ended, time.monotonic() + seconds)
        if not store.check([word]):
            store.compare_set(word, "", self._missing(store, place, ended, seconds))
        said = store.get(word).decode()
        if said != GO:
            kind = RankJoined if JOINED in said else RankAbsent
            raise kind(f"{said} for {what} of step {step}")
        self._tidy_up(store, place)

    def arrive(self, what: str, step: int) -> str:
        """Count that this rank comes to a meeting; returns its name, the same on all ranks."""
        # Named by step, so that a call that only one rank made does not shift all that follow.
        self._times[what, step] += 1
        if len(self._times) > REMEMBERED:
            del self._times[next(iter(self._times))]
        return f"{what}/{step}/{self._times[what, step]}"

    def times(self, what: str, step: int) -> int:
        """How often this rank has come to a meeting of this name in this step."""
        return self._times[what, step]

    def call_off(self, what: str, step: int, time: int, why: str) -> None:
        """This rank cannot come to that meeting: those who wait there go at once."""
        self._times[what, step] = time
        with contextlib.suppress(Exception):
            word = f"{self._name}/{what}/{step}/{time}/word"
            default_store().compare_set(word, "", f"rank {self._own} has failed ({why})")

    def _tidy_up(self, store: Any, place: str) -> None:
        """Everybody is here: what was said before has been read."""
        store.delete_key(f"{place}/{self._own}")
        while self._gave_up:
            store.delete_key(self._gave_up.pop())
        if self._own == self._members[0]:
            for key in self._over:
                store.delete_key(key)
            self._over = [f"{place}/word", f"{place}/count"]

    def leave(self, why: str, *, for_good: bool = False) -> None:
        """Let nobody wait for this rank. `for_good`: it takes part in no reduction any more."""
        if self.solo:
            return
        # The group, or the process that holds the store, may be gone: then nobody waits.
        with contextlib.suppress(Exception):
            store = default_store()
            store.set(f"{self._name}/left", f"rank {self._own} {why}, so it did not come")
            if for_good:
                store.set(f"{self._name}/closed", str(self._own))

    def begin(self) -> None:
        """A rank that has not begun its first step waits in vain for one that has."""
        self.began = True
        self.tell("began", f"rank {self._own} has begun to train, so it did not come")

    def tell(self, about: str, text: str) -> None:
        """Leave a word for all ranks; nobody waits for it. The empty text takes it back."""
        with contextlib.suppress(Exception):
            store = default_store()
            if text:
                store.set(f"{self._name}/{about}", text)
            else:
                store.delete_key(f"{self._name}/{about}")

    def told(self, about: str) -> str:
        """What a rank has left, empty if nothing: one question to the store."""
        with contextlib.suppress(Exception):
            store = default_store()
            if store.check([f"{self._name}/{about}"]):
                text: str = store.get(f"{self._name}/{about}").decode()
                return text
        return ""

    def claim(self, about: str) -> bool:
        """Is this rank the first to ask for it? Where the store is gone, nobody else can."""
        with contextlib.suppress(Exception):
            key = f"{self._name}/{about}/by"
            claimed: bytes = default_store().compare_set(key, "", str(self._own))
            return claimed.decode() == str(self._own)
        return True

    def word_of(self, about: str, seconds: float) -> str:
        """What a rank tells about this, for which it may take its time; empty if nothing."""
        with contextlib.suppress(Exception):
            store = default_store()
            self._wait(store, f"{self._name}/{about}", [], time.monotonic() + seconds)
        return self.told(about).strip()

    def no_data_left(self) -> None:
        """This rank only follows the collectives of the others from now on."""
        with contextlib.suppress(Exception):
            default_store().set(self._joined, str(self._own))

    def data_again(self) -> None:
        """All ranks have run out of data, and go on together."""
        self.joining = False
        with contextlib.suppress(Exception):
            default_store().delete_key(self._joined)

    def nobody_came(self, what: str, step: int) -> None:
        """Leave nothing behind where the other ranks have no such guard, as it seems."""
        store = default_store()
        place = f"{self._name}/{what}/{step}/{self._times[what, step]}"
        if store.check([f"{self._name}/left"]) or int(store.add(f"{place}/count", 0)) > 1:
            return
        self.solo = True
        for key in (str(self._own), "count", "word"):
            store.delete_key(f"{place}/{key}")

    @property
    def _joined(self) -> str:
        """Where a rank says that it has run out of data."""
        return f"{self._name}/joined"

    def give_up(self, step: int, why: str) -> None:
        """This rank has failed in this step: it comes to no meeting but the one that ends it."""
        with contextlib.suppress(Exception):
            default_store().set(self._given_up(step), f"rank {self._own} has failed ({why})")
            self._gave_up.append(self._given_up(step))

    def absent(self, step: int) -> bool:
        """Has a rank left, or failed in this step?"""
        store = default_store()
        keys = (f"{self._name}/left", self._given_up(step))
        return any(store.check([key]) for key in keys)

    def _given_up(self, step: int) -> str:
        return f"{self._name}/failed/{step}"

    def refuse_if_closed(self, step: int) -> None:
        """Raise RankAbsent if a rank has closed its guard: one question to the store."""
        if len(self._members) > MOST_ASKED:
            return
        store = default_store()
        if store.check([f"{self._name}/closed"]):
            rank = store.get(f"{self._name}/closed").decode()
            raise RankAbsent(f"rank {rank} has closed its guard before step {step}")

    def _wait(self, store: Any, word: str, ended: list[str], deadline: float) -> None:
        """Until something is said, one of the keys `ended` is there, or time is up.

        Not by `store.wait`: a signal is handled only when that returns, and torch prints two lines
        when its time is up.
        """
        pause = SHORTEST
        while not store.check([word]):
            if time.monotonic() >= deadline or any(store.check([key]) for key in ended):
                return
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST)

    def _missing(self, store: Any, place: str, ended: list[str], seconds: float) -> str:
        for key in ended:
            if store.check([key]):
                said: str = store.get(key).decode()
                return f"rank {said} {JOINED}" if key == self._joined else said
        missing = [str(rank) for rank in self._members if not store.check([f"{place}/{rank}"])]
        ranks = "rank" if len(missing) == 1 else "ranks"
        return f"{ranks} {', '.join(missing)} did not come within {seconds:g} s"
