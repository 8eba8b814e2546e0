"""What a framework that runs its own loop tells the guard: the micro-batches of the step, and how
to compute each loss.

With that a watched step is as whole as one of `guard.step`: it can be replayed from batch to loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from stepguard.state.rng import RngState, capture_rng
from stepguard.state.step import LossFn, Step


class MicroBatches:
    """Remembers the micro-batches since the last update."""

    def __init__(self, deaf: Callable[[], AbstractContextManager[None]]) -> None:
        self._deaf = deaf
        self._loss_fn: LossFn | None = None
        self._kept: list[tuple[Any, RngState]] = []

    def add(self, loss_fn: LossFn, batch: Any) -> None:
        """Forward and backward of `batch` come next; random numbers are those of now."""
        self._loss_fn = loss_fn
        self._kept.append((batch, capture_rng()))

    @property
    def first(self) -> bool:
        """Has nothing of the step been told yet?"""
        return not self._kept

    def clear(self) -> None:
        self._kept = []

    def complete(self, step: Step, backwards: int) -> bool:
        """Make `step` whole, if every backward that was heard has its micro-batch. False leaves it
        as it is.

        Earlier ones belong to gradients that the loop has dropped since.
        """
        if self._loss_fn is None or not self._kept or len(self._kept) < backwards:
            return False
        kept = self._kept
        if backwards:
            kept = kept[-backwards:]
        step.loss_fn = self._unheard(self._loss_fn)
        step.micro_batches = tuple(batch for batch, _ in kept)
        step.rng = [rng for _, rng in kept]
        return True

    def _unheard(self, loss_fn: LossFn) -> LossFn:
        """In a replay the guard must not take what it hears for the next step."""

        def again(batch: Any) -> Tensor | Mapping[str, Tensor]:
            with self._deaf():
                return loss_fn(batch)

        return again
