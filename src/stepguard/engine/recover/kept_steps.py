"""Keep the steps since the last good snapshots, by reference, so that they can be run again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from stepguard.sentinel.rank_agreement import Agreement
from stepguard.state.batch import Step, named_tensors
from stepguard.state.snapshot import Cadence
from stepguard.tensors.values import versions, written_since

# --- Keep the steps since the last good snapshots, by reference, so that they can be run again.


MOST_STEPS = 512
RANDOM_NUMBERS = 32 * 1024
"""Bytes that the states of the generators take, roughly, for each micro-batch."""
SAME_LOSS = 1e-3
"""Relative difference up to which two losses of one step differ only by the order of additions."""


@dataclass(slots=True)
class KeptStep:
    """A step that went through, its loss, and marks that show whether its batch was written to."""

    step: Step
    loss: float | None
    size: int
    tensors: list[Tensor]
    marks: list[int]
    lr: tuple[float, ...] = ()
    """The rates it was trained with."""

    @property
    def intact(self) -> bool:
        return not written_since(self.tensors, self.marks)

    def same(self, loss: float | None) -> bool:
        """Is this the loss it had the first time?"""
        if loss is None or self.loss is None:
            return loss is self.loss
        return math.isclose(loss, self.loss, rel_tol=SAME_LOSS, abs_tol=1e-12)


class KeptSteps:
    """As many of the last steps as fit into `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kept: deque[KeptStep] = deque()
        self._complete_from = 0
        """Every step from here on is kept, but for those that had no effect."""

    def keep(self, step: Step, loss: float | None, lr: tuple[float, ...] = ()) -> None:
        if not step.repeatable or not self._limit:
            self.broken(step.index)
            return
        tensors: list[Tensor] = []
        for batch in step.micro_batches:
            tensors += [tensor for _, tensor in named_tensors(batch)]
        size = RANDOM_NUMBERS * len(step.micro_batches)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._kept.append(KeptStep(step, loss, size, tensors, versions(tensors), lr))
        self._size += size
        while self._kept and (self._size > self._limit or len(self._kept) > MOST_STEPS):
            self._complete_from = self._drop_oldest() + 1

    def broken(self, index: int) -> None:
        """Drop everything: this step changed the state and cannot be run again as it was."""
        self._kept.clear()
        self._size = 0
        self._complete_from = index + 1

    def forget_before(self, step: int) -> None:
        """Drop the steps before this one: no rewind goes back further."""
        while self._kept and self._kept[0].step.index < step:
            self._drop_oldest()
        self._complete_from = max(self._complete_from, step)

    def at(self, step: int) -> KeptStep | None:
        """This very step, if its batch is still as it was."""
        for kept in self._kept:
            if kept.step.index == step and kept.intact:
                return kept
        return None

    def intact(self) -> list[KeptStep]:
        """Every kept step whose batch is still as it was, oldest first."""
        return [kept for kept in self._kept if kept.intact]

    def since(self, step: int) -> list[KeptStep] | None:
        """The steps from this one on; None where some of them are missing or were written to."""
        if self._complete_from > step:
            return None
        found: list[KeptStep] = []
        for kept in self._kept:
            if kept.step.index >= step:
                if not kept.intact:
                    return None
                found.append(kept)
        return found

    def take_since(self, step: int) -> list[KeptStep]:
        """Take out the steps from this one on: the run has gone back before them."""
        taken = [kept for kept in self._kept if kept.step.index >= step]
        for kept in taken:
            self._kept.remove(kept)
            self._size -= kept.size
        self._complete_from = min(self._complete_from, step)
        return taken

    def _drop_oldest(self) -> int:
        oldest = self._kept.popleft()
        self._size -= oldest.size
        return oldest.step.index


# --- When the ranks of a run take their snapshots: all at the same steps, by the first rank's
# clock.


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
            about = _change_at((step // REVISED + 1) * REVISED)
            self._agreement.tell(about, str(wanted))
            self._told.append(about)
            if len(self._told) > KEPT:
                self._agreement.tell(self._told.popleft(), "")

    def rewound(self, step: int) -> None:
        super().rewound(step)
        self._asked = -1


def _change_at(step: int) -> str:
    return f"snapshots every/{step}"
