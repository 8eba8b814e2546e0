"""What a watched loop lets slip: the root of every backward (the loss) and the norm its clipping takes."""

from __future__ import annotations

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.reader import MicroLoss, announce
from stepguard.sentinel.gradients import HALVES, GradientNorm


class Overheard:
    """A listener of sentinel.taps for one guard. Never waits for the device."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.losses: list[MicroLoss] = []
        self._norm: Tensor | None = None
        self._marks: list[tuple[int, int]] = []
        self._before: list[tuple[int, int]] = []

    def before_backward(self, root: Tensor) -> None:
        """A scalar that backward starts from is the loss; a scaler's factor is divided out again."""
        if root.numel() != 1 or not root.requires_grad or torch.compiler.is_compiling():
            return
        value = root.detach()
        scaler = self._context.scaler
        if scaler is not None and self._context.scaling():
            scale = scaler._get_scale_async()
            value = value / scale if scale is not None else value
        self._before = self._gradient_marks()
        self.losses.append(MicroLoss(value))
        announce(self._context, value)

    def after_backward(self, root: Tensor) -> None:
        """A backward that left this guard's gradients alone was somebody else's loss."""
        if root.numel() == 1 and self.losses and self._gradient_marks() == self._before:
            self.losses.pop()

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        """Clipping took the norm of all gradients: no need to take it again."""
        ours = [p.grad for p in self._context.parameters if p.grad is not None]
        if len(ours) == len(tensors) and all(a is b for a, b in zip(ours, tensors, strict=True)):
            self._norm = None if any(t.dtype in HALVES for t in tensors) else norm
            self._marks = self._gradient_marks()

    def norm(self) -> GradientNorm | None:
        """The norm before clipping, unless the gradients were touched by anything but clipping since."""
        if self._norm is None:
            return None
        grown = [
            (now[0] == then[0]) and now[1] - then[1] <= 1
            for now, then in zip(self._gradient_marks(), self._marks, strict=False)
        ]
        return GradientNorm(self._norm, self._norm) if all(grown) else None

    def clear(self) -> None:
        self.losses, self._norm = [], None

    def _gradient_marks(self) -> list[tuple[int, int]]:
        grads = [p.grad for p in self._context.parameters]
        return [(id(g), g._version) if g is not None else (0, 0) for g in grads]
