"""Veto an update by hiding every gradient until optimizer.step() has returned.

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

MOST_NAMED = 3


class GradientVeto:
    """The hidden gradients of one update, and how what it moved is undone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._forget()
        self._give_back_later: Callable[[], None] | None = None
        self._why_no_copy = ""

    def _forget(self) -> None:
        self._parameters: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._versions: list[int] = []
        self._undo: UndoCopy | None = None

    @property
    def hidden(self) -> bool:
        """Is an update being vetoed?"""
        return bool(self._parameters)

    def give_back_later(self, give_back: Callable[[], None] | None) -> None:
        """Call this as well once the update is over: it gives back single gradients."""
        self._give_back_later = give_back

    def hide(self, copy: UndoCopy | None = None) -> None:
        """Hide the gradients. `copy`: taken before, of an optimizer that has already begun."""
        context = self._context
        self._parameters = list(context.parameters)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._undo = copy
        self._why_no_copy = ""
        if copy is None and is_custom(context.optimizer):
            self._undo = self._copy()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = None
            if self._undo is not None and gradient is not None:
                parameter.grad = torch.zeros_like(gradient)
        self._versions = versions(self._parameters)

    def give_back(self) -> None:
        """Give back the gradients, which the loop may still want to read."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if self._give_back_later is not None:
            self._give_back_later()
            self._give_back_later = None

    def put_back(self) -> str:
        """Undo what the update moved all the same; in words what cannot be undone."""
        parameters = self._parameters
        marks = self._versions
        undo = self._undo
        self._forget()
        if undo is None:
            return self._moved_without_gradient(parameters, marks)
        unknown = undo.restore()
        if not unknown:
            return ""
        return f"{', '.join(unknown)} cannot be compared, and may have moved"

    def release(self) -> None:
        """Let the update happen after all."""
        self.give_back()
        self._forget()

    def _moved_without_gradient(self, parameters: list[Tensor], marks: list[int]) -> str:
        moved = set()
        for parameter, mark in zip(parameters, marks, strict=True):
            if written_since([parameter], [mark]):
                moved.add(id(parameter))
        if not moved:
            return ""
        optimizer = self._context.optimizer
        names = []
        for parameter, name in parameter_names(self._context.roots, optimizer):
            if id(parameter) in moved:
                names.append(name)
        told = ", ".join(names[:MOST_NAMED])
        return f"{type(optimizer).__name__} moved {told} without a gradient{self._why_no_copy}"

    def _copy(self) -> UndoCopy | None:
        try:
            return UndoCopy(self._context.optimizer)
        except Exception as fault:
            # of the user's objects, or no memory: hiding is all that is left
            self._why_no_copy = f", and no copy could be taken ({type(fault).__name__}: {fault})"
            return None
