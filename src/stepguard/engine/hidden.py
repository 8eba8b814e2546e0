"""Gradients out of the optimizer's sight: an update that finds none has nothing to do."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stepguard.engine.closure import silence
from stepguard.engine.context import Context


class HiddenGradients:
    """Taken away before an update that must not happen, and given back after it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: list[tuple[Tensor, Tensor | None]] = []
        self._later: Callable[[], None] | None = None

    def give_back_later(self, give_back: Callable[[], None] | None) -> None:
        """Single gradients that somebody else has taken away for this update."""
        self._later = give_back

    def hide(self, *, needs_some: bool) -> None:
        """`needs_some`: a closure optimizer needs gradients to end on, so it gets zeros."""
        self._kept = [(p, p.grad) for p in self._context.parameters]
        if needs_some:
            silence(self._context.optimizer)
            return
        for parameter, _ in self._kept:
            parameter.grad = None

    def give_back(self) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []
        if self._later is not None:
            self._later()
            self._later = None
