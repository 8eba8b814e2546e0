"""An update that must not happen: its gradients are hidden, and what the optimizer does all the
same is undone.

torch's own optimizers leave a parameter without a gradient alone. Others fill in zeros, insist on
gradients, count steps or pull in slow weights: they get gradients of zero, and a copy of everything
from just before is put back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.sentinel.risky_update import is_custom
from stepguard.state.undo import UndoCopy
from stepguard.tensors.names import parameter_names
from stepguard.tensors.versions import versions, written_since


class GradientVeto:
    """Taken away before the update and given back after it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: list[tuple[Tensor, Tensor | None]] = []
        self._later: Callable[[], None] | None = None
        self._undo: UndoCopy | None = None
        self._versions: list[int] = []
        self._why_no_copy = ""

    def give_back_later(self, give_back: Callable[[], None] | None) -> None:
        """Single gradients that somebody else has taken away for this update."""
        self._later = give_back

    @property
    def hidden(self) -> bool:
        return bool(self._kept)

    def hide(self, copy: UndoCopy | None = None) -> None:
        """`copy`: one that has been taken before, of an optimizer that has already begun."""
        context = self._context
        self._kept = [(p, p.grad) for p in context.parameters]
        self._undo, self._why_no_copy = copy, ""
        if copy is None and is_custom(context.optimizer):
            self._undo = self._copy()
        for parameter, gradient in self._kept:
            parameter.grad = (
                torch.zeros_like(gradient)
                if self._undo is not None and gradient is not None
                else None
            )
        self._versions = versions(p for p, _ in self._kept)

    def give_back(self) -> None:
        """The gradients, which the loop may still want to look at."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        if self._later is not None:
            self._later()
            self._later = None

    def put_back(self) -> str:
        """Undo what the update moved without a reason; in words what cannot be undone, empty if
        nothing.
        """
        kept = [parameter for parameter, _ in self._kept]
        undo = self._undo
        marks = self._versions
        self._kept, self._undo, self._versions = [], None, []
        if undo is not None:
            unknown = undo.restore()
            return f"{', '.join(unknown)} cannot be compared, and may have moved" if unknown else ""
        moved = written_since(kept, marks)
        if not moved:
            return ""
        ids, names = (
            {id(p) for p in moved},
            parameter_names(self._context.roots, self._context.optimizer),
        )
        told = ", ".join([name for p, name in names if id(p) in ids][:3])
        return (
            f"{type(self._context.optimizer).__name__} moved {told} without a "
            f"gradient{self._why_no_copy}"
        )

    def release(self) -> None:
        """The update goes on after all."""
        self.give_back()
        self._kept, self._undo, self._versions = [], None, []

    def _copy(self) -> UndoCopy | None:
        try:
            return UndoCopy(self._context.optimizer)
        except (
            Exception
        ) as fault:  # of the user's objects, or no memory: hiding is all that is left
            self._why_no_copy = f", and no copy could be taken ({type(fault).__name__}: {fault})"
            return None
