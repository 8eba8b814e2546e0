"""What a watched loop lets slip: the root of every backward (the loss) and the norm its clipping
takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.reader import MicroLoss
from stepguard.sentinel.gradients import GradientNorm, gradient_norm
from stepguard.sentinel.risky_update import is_custom
from stepguard.tensors.values import HALVES

Marks = list[tuple[int, int]]


class ObservedLoss:
    """The losses and the norm of one guard's next update. Never waits for the device."""

    def __init__(self, context: Context, announce: Callable[[Tensor], None]) -> None:
        self._context, self._announce = context, announce
        self.losses: list[MicroLoss] = []
        self._norm: Tensor | None = None
        self._at_norm: Marks = []
        self._at_start: Marks = []
        self._at_end: Marks = []
        self._heard = False
        self._taken: tuple[GradientNorm, Marks] | None = None
        self.labels: Tensor | None = None
        """Targets that count in the micro-batch at hand, where a framework tells."""

    @property
    def clipped(self) -> bool:
        """Have the gradients been through clipping, which makes all of them NaN where the norm is?"""
        return bool(self._at_norm)

    def before_backward(self, root: Tensor) -> None:
        """A scalar that backward starts from is the loss; a scaler's factor is divided out again."""
        self._heard = root.numel() == 1 and root.requires_grad and not torch.compiler.is_compiling()
        if not self._heard:
            return
        value = root.detach()
        scaler = self._context.scaler
        if scaler is not None and self._context.scaling():
            scale = scaler._get_scale_async()
            value = value / scale if scale is not None else value
        self._at_start = self._gradient_marks()
        if self.losses and self._at_start != self._at_end:
            # their gradients have been dropped since, so they are part of no update
            self.losses = []
        self.losses.append(MicroLoss(value, labels=self.labels))
        self._announce(value)

    def after_backward(self, *, failed: bool) -> bool:
        """Was it this guard's loss? A backward that left its gradients alone was somebody else's."""
        if not self._heard:
            return False
        self._heard = False
        self._at_end = self._gradient_marks()
        ours = not failed and self._at_end != self._at_start
        if self.losses and not ours:
            self.losses.pop()
        return ours

    def divide(self, scale: Tensor | None) -> None:
        """The losses heard so far carry this factor, which was not known then."""
        if scale is not None:
            for loss in self.losses:
                loss.total = loss.total / scale

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        """Clipping took the norm of all gradients: no need to take it again."""
        ours = [p.grad for p in self._context.parameters if p.grad is not None]
        if len(ours) == len(tensors) and all(a is b for a, b in zip(ours, tensors, strict=True)):
            self._norm = None if any(t.dtype in HALVES for t in tensors) else norm
            self._at_norm = self._gradient_marks()

    def norm(self) -> GradientNorm | None:
        """The norm before clipping, unless the gradients were touched by anything but clipping
        since.
        """
        if self._norm is None:
            return self._taken_norm() or self._scaled_norm()
        grown = [
            (now[0] == then[0]) and now[1] - then[1] <= 1
            for now, then in zip(self._gradient_marks(), self._at_norm, strict=False)
        ]
        return GradientNorm(self._norm, self._norm) if all(grown) else self._scaled_norm()

    def take_norm(self) -> Tensor | None:
        """The norm now, for another optimizer of the same step; used again if nothing is written in
        between.
        """
        found = self.norm()
        if found is None:
            grads = [p.grad for p in self._context.parameters if p.grad is not None]
            found = gradient_norm(grads, each=is_custom(self._context.optimizer))
            if found is not None:
                self._taken = (found, self._gradient_marks())
        return found.total if found is not None else None

    def _taken_norm(self) -> GradientNorm | None:
        if self._taken is not None and self._taken[1] == self._gradient_marks():
            return self._taken[0]
        return None

    def _scaled_norm(self) -> GradientNorm | None:
        """Where a scaler leaves dividing to the fused kernel, the gradients still carry its factor."""
        scale = getattr(self._context.optimizer, "grad_scale", None)
        if scale is None:
            return None
        scaled = gradient_norm([p.grad for p in self._context.parameters if p.grad is not None])
        return GradientNorm(scaled.total / scale, scaled.clip) if scaled is not None else None

    def clear(self) -> None:
        """An update has used what was heard."""
        self.losses, self._norm, self._at_norm = [], None, []
        self.labels, self._taken = None, None

    def _gradient_marks(self) -> Marks:
        grads = [p.grad for p in self._context.parameters]
        return [(id(g), g._version) if g is not None else (0, 0) for g in grads]
