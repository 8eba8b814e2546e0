"""What a loop that makes its own steps tells the guard: the micro-batches, and how to compute each
loss. A framework tells them before it runs them, a user's loop by `guard.loss`.

With that a watched step is as whole as one of `guard.step`: it can be replayed from batch to loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from stepguard.state.rng import RngState, capture_rng
from stepguard.state.step import LossFn, Step

LOSS_SCALING = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0"})
"""Autograd nodes that a loop may put between a loss and its backward: a factor, another dtype."""


class MicroBatches:
    """Remembers the micro-batches since the last update."""

    def __init__(self, deaf: Callable[[], AbstractContextManager[None]]) -> None:
        self._deaf = deaf
        self._loss_fn: LossFn | None = None
        self._kept: list[tuple[Any, RngState]] = []
        self._handed_out: list[Any] = []
        """Autograd nodes of the losses that `guard.loss` has returned since the last update."""
        self._incomplete = False
        """Backward was called on more than these losses: a replay would leave something out."""

    def add(self, loss_fn: LossFn, batch: Any) -> None:
        """Forward and backward of `batch` come next; random numbers are those of now."""
        self._loss_fn = loss_fn
        self._kept.append((batch, capture_rng()))

    @property
    def first(self) -> bool:
        """Has nothing of the step been told yet?"""
        return not self._kept

    def hand_out(self, loss: Tensor) -> None:
        """The loop gets this loss, and is to call backward on it."""
        self._handed_out.append(loss.grad_fn)

    def heard(self, root: Tensor) -> None:
        """Backward starts at `root`: is it a loss that was handed out, up to a factor?"""
        if self._handed_out and not _leads_to(root.grad_fn, self._handed_out):
            self._incomplete = True

    def clear(self) -> None:
        self._kept = []
        self._handed_out = []
        self._incomplete = False

    def complete(self, step: Step, backwards: int) -> bool:
        """Make `step` whole, if every backward that was heard has its micro-batch. False leaves it
        as it is.

        Earlier ones belong to gradients that the loop has dropped since.
        """
        if self._loss_fn is None or not self._kept or len(self._kept) < backwards:
            return False
        if self._incomplete:
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


def _leads_to(node: Any, wanted: list[Any]) -> bool:
    """Is nothing but a factor between this node and one of `wanted`?"""
    while node is not None:
        if any(node is one for one in wanted):
            return True
        inputs = [source for source, _ in node.next_functions if source is not None]
        if node.name() not in LOSS_SCALING or len(inputs) != 1:
            return False
        node = inputs[0]
    return False
