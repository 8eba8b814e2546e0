"""Loss and pre-clip gradient norm, observed from a watched loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.reader import MicroLoss, own_norm, summed_in_half
from stepguard.sentinel.gradients import GradientNorm, gradient_norm
from stepguard.sentinel.risky_update import is_custom
from stepguard.sentinel.torch_patches import unscaled
from stepguard.tensors.values import HALVES, dense_values

Marks = list[tuple[int, int]]


class ObservedLoss:
    """The losses and the norm of one guard's next update. Never waits for the device."""

    def __init__(self, context: Context, announce: Callable[..., None]) -> None:
        self._context = context
        self._announce = announce
        self.losses: list[MicroLoss] = []
        self._norm: GradientNorm | None = None
        self._at_norm: Marks = []
        self._at_start: Marks = []
        self._at_end: Marks = []
        self._heard = False
        self._taken: tuple[GradientNorm, Marks] | None = None
        self.labels: Tensor | None = None
        """Targets that count in the micro-batch at hand, where a framework tells."""

    @property
    def clipped(self) -> bool:
        """Were the gradients clipped? Where the norm is NaN, that makes all of them NaN."""
        return bool(self._at_norm)

    def before_backward(self, root: Tensor) -> None:
        """A scalar that backward starts from is the loss; a scaler's factor is divided out."""
        self._heard = False
        if root.numel() != 1 or not root.requires_grad or torch.compiler.is_compiling():
            return
        self._heard = True
        before = unscaled(root)
        value = root.detach() if before is None else before
        scaler = self._context.scaler
        scaled = before is None and scaler is None
        if before is None and scaler is not None and self._context.scaling():
            scale = scaler._get_scale_async()
            if scale is not None:
                value = value / scale
        self._at_start = self._gradient_marks()
        if self.losses and self._at_start != self._at_end:
            # their gradients have been dropped since, so they are part of no update
            self.losses = []
        summed = summed_in_half(root, self._context)
        self.losses.append(
            MicroLoss(value, labels=self.labels, summed_in_half=summed, scaled=scaled)
        )
        self._announce(value, summed_in_half=summed)

    def after_backward(self, *, failed: bool) -> bool:
        """Was it this guard's loss? Another one's backward leaves its gradients alone."""
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
                if loss.scaled:
                    loss.total = loss.total / scale
                    loss.scaled = False

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        """Clipping took the norm of all gradients: no need to take it again."""
        ours = self._gradients()
        if len(ours) != len(tensors):
            return
        if not all(mine is theirs for mine, theirs in zip(ours, tensors, strict=True)):
            return
        # Of sharded gradients each rank keeps its part: the whole would take a collective, which a
        # rank without a guard does not join. What ranks exchange for the step adds the parts up.
        shares = self._context.shares
        if shares is not None:
            self._norm = shares.heard(norm)
        else:
            own = dense_values(norm)
            self._norm = GradientNorm(own, own)
        if any(tensor.dtype in HALVES for tensor in tensors):
            # torch takes it in half precision, where it overflows early
            self._norm = None
        self._at_norm = self._gradient_marks()

    def norm(self) -> GradientNorm | None:
        """The norm before clipping, unless anything but clipping has written gradients since."""
        if self._norm is None:
            return self._taken_norm() or self._scaled_norm()
        for now, then in zip(self._gradient_marks(), self._at_norm, strict=False):
            same_tensor = now[0] == then[0]
            writes = now[1] - then[1]
            # clipping itself writes each gradient once
            if not same_tensor or writes > 1:
                return self._scaled_norm()
        return self._norm

    def take_norm(self) -> Tensor | None:
        """The norm now, for another optimizer of the same step; kept for this one's own step."""
        found = self.norm()
        if found is None:
            found = self._measured()
            if found is not None:
                self._taken = (found, self._gradient_marks())
        if found is None:
            return None
        return found.total

    def _measured(self) -> GradientNorm | None:
        each = is_custom(self._context.optimizer)
        shares = self._context.shares
        if shares is not None:
            return shares.norm(self._context.parameters, each=each)
        return gradient_norm(self._gradients(), each=each)

    def _taken_norm(self) -> GradientNorm | None:
        if self._taken is None:
            return None
        norm, marks = self._taken
        if marks != self._gradient_marks():
            return None
        return norm

    def _scaled_norm(self) -> GradientNorm | None:
        """Where a scaler leaves dividing to the fused kernel, gradients still carry its factor."""
        scale = getattr(self._context.optimizer, "grad_scale", None)
        return None if scale is None else own_norm(self._context)

    def clear(self) -> None:
        """An update has used what was observed."""
        self.losses = []
        self._norm = None
        self._at_norm = []
        self.labels = None
        self._taken = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._context.parameters if p.grad is not None]

    def _gradient_marks(self) -> Marks:
        """Identity and version of each gradient: torch counts the writes to a tensor."""
        marks = []
        for parameter in self._context.parameters:
            gradient = parameter.grad
            marks.append((0, 0) if gradient is None else (id(gradient), gradient._version))
        return marks
