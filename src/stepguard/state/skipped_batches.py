"""Batches that were left out before and are not delivered again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from stepguard.state.sample_indices import Index

Place = tuple[int, int]
"""A pass over the data and the number of a batch in it, both from 0."""


class Batch(Protocol):
    @property
    def indices(self) -> tuple[Index, ...] | None: ...


class SkippedBatches:
    """Knows which batches not to deliver, and says so once for each stretch of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._places: frozenset[Place] = frozenset()
        self._causes: Mapping[Place, str] = {}
        self._indices: Mapping[Place, Collection[Index]] = {}
        self._epoch = 0
        self._stretch: list[Place] = []

    def expect(
        self,
        places: Collection[Place],
        epoch: int,
        causes: Mapping[Place, str],
        indices: Mapping[Place, Collection[Index]],
    ) -> None:
        """`epoch` is the pass whose order of batches is known to be the same as before."""
        self._places = frozenset(places)
        self._epoch = epoch
        self._causes = causes
        self._indices = indices

    def skips(self, place: Place, batch: Batch) -> bool:
        """Is this a batch that must not be delivered?"""
        if place in self._places and self._is_the_same(place, batch):
            self._stretch.append(place)
            return True
        self.tell()
        return False

    def _is_the_same(self, place: Place, batch: Batch) -> bool:
        expected = self._indices.get(place)
        indices = batch.indices
        if not expected or indices is None:
            return place[0] == self._epoch
        return set(expected) <= set(indices)

    def tell(self) -> None:
        """Say one line on the stretch that has ended."""
        stretch = self._stretch
        self._stretch = []
        if not stretch:
            return
        epoch, first = stretch[0]
        _, last = stretch[-1]
        which = f"batch {first}" if first == last else f"batches {first}-{last}"
        line = f"passing over {which} of pass {epoch}: left out before"
        # A dict keeps the order and names each cause once.
        causes = dict.fromkeys(self._causes[place] for place in stretch if place in self._causes)
        if causes:
            line += f" as {', '.join(causes)}"
        self._say(line)
