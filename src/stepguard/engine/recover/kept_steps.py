"""The steps since the last good snapshots, kept by reference so that they can be run again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from stepguard.state.batch import named_tensors
from stepguard.state.step import Step

MOST_STEPS = 512
RANDOM_NUMBERS = 32 * 1024
"""What the states of the generators take, roughly, for each micro-batch."""
SAME_LOSS = 1e-3
"""Relative difference up to which two losses of one step are the same but for the order of
additions.
"""


@dataclass(slots=True)
class Kept:
    """A step that went through, its loss, and marks that show whether its batch has been written to
    since.
    """

    step: Step
    loss: float | None
    size: int
    tensors: list[Tensor]
    marks: list[int]

    @property
    def intact(self) -> bool:
        return self.marks == [t._version for t in self.tensors]

    def same(self, loss: float | None) -> bool:
        """Is this the loss it had the first time?"""
        if loss is None or self.loss is None:
            return loss is self.loss
        return math.isclose(loss, self.loss, rel_tol=SAME_LOSS, abs_tol=1e-12)


class Window:
    """As many of the last steps as fit into `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._kept: deque[Kept] = deque()
        self._whole_from = 0
        """Every step from here on is kept, but for those that had no effect."""

    def keep(self, step: Step, loss: float | None) -> None:
        if not step.replayable or not self._limit:
            self.broken(step.index)
            return
        tensors = [t for batch in step.micro_batches for _, t in named_tensors(batch)]
        size = sum(t.numel() * t.element_size() for t in tensors) + RANDOM_NUMBERS * len(
            step.micro_batches
        )
        self._kept.append(Kept(step, loss, size, tensors, [t._version for t in tensors]))
        self._size += size
        while self._kept and (self._size > self._limit or len(self._kept) > MOST_STEPS):
            self._whole_from = self._drop_oldest() + 1

    def broken(self, index: int) -> None:
        """This step changed the state and cannot be run again as it was."""
        self.forget_before(index + 1)
        self._kept.clear()
        self._size, self._whole_from = 0, index + 1

    def forget_before(self, step: int) -> None:
        """Nobody will go back further than this."""
        while self._kept and self._kept[0].step.index < step:
            self._drop_oldest()
        self._whole_from = max(self._whole_from, step)

    def at(self, step: int) -> Kept | None:
        """This very step, if its batch is still as it was."""
        return next((k for k in self._kept if k.step.index == step and k.intact), None)

    def since(self, step: int) -> list[Kept] | None:
        """The steps from this one on; None where some of them are missing or were written to."""
        kept = [k for k in self._kept if k.step.index >= step]
        return kept if self._whole_from <= step and all(k.intact for k in kept) else None

    def rewound(self, step: int) -> list[Kept]:
        """Take out the steps from this one on: the run is before them now."""
        gone = [k for k in self._kept if k.step.index >= step]
        for kept in gone:
            self._kept.remove(kept)
            self._size -= kept.size
        self._whole_from = min(self._whole_from, step)
        return gone

    def _drop_oldest(self) -> int:
        oldest = self._kept.popleft()
        self._size -= oldest.size
        return oldest.step.index
