"""Fused optimizers: the veto happens on the device through `found_inf`, and the host learns of it
one step later.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from stepguard.engine import step_end
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import ScheduleCopy
from stepguard.engine.reader import Pending, Reader
from stepguard.engine.result import StepResult
from stepguard.records import Reading
from stepguard.sentinel.gradients import GradientMark
from stepguard.state.step import Step


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Every group is fused, so the kernel itself leaves parameters and moments alone when told to."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """What a scaler, or this guard, has told a fused optimizer."""
    return getattr(optimizer, "found_inf", None)


def read_later(context: Context) -> bool:
    """Outliers have to be known before the update, so it is read at once; a scaler's flag is left
    to the kernel.
    """
    optimizer = context.optimizer
    return takes_found_inf(optimizer) and (
        context.outliers is None or found_inf(optimizer) is not None
    )


class LateUpdate:
    """An update that has been issued and whose verdict is not read yet."""

    def __init__(self, context: Context, step: Step, pending: Pending, result: StepResult) -> None:
        self.step, self.pending, self.result = step, pending, result
        self.flag = pending.suspect()
        """On the device: not 0 where the kernel leaves everything alone."""
        self._schedule = (
            ScheduleCopy(context.scheduler, context.optimizer)
            if context.scheduler is not None
            else None
        )
        self._scaler = step_end.scaler_copy(context)
        known = context.optimizer.state
        self._new = (
            [p for p in context.parameters if p not in known]
            if len(known) < len(context.parameters)
            else []
        )
        self._grads: GradientMark | None = None

    def issued(self, context: Context) -> None:
        """The update is on its way; from now on the loop may drop the gradients."""
        self._grads = GradientMark(context.parameters)

    def read(self, reader: Reader) -> Reading:
        """Wait for the numbers of this update."""
        gone = self._grads is not None and self._grads.gone()
        self.step.grads_gone |= gone
        return reader.complete(self.pending, grads_gone=gone)

    def update(self, optimizer: Optimizer) -> None:
        """Step, unless the device finds something non-finite."""
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]

    @staticmethod
    def vetoed(reading: Reading) -> bool:
        """Did the device leave the parameters alone? The same test as `Pending.suspect`, on the
        host.
        """
        watched = (
            reading.loss,
            reading.grad_norm,
            *reading.micro_losses,
            *reading.components.values(),
        )
        finite = all(value is None or math.isfinite(value) for value in watched)
        return reading.alarm or bool(reading.bad_state) or not finite

    def take_back(self, context: Context, *, calibrating: bool, schedule: bool = True) -> None:
        """What the host did on the assumption that the step would go through."""
        if self._schedule is not None and schedule:
            self._schedule.restore()
        for parameter in self._new:
            context.optimizer.state.pop(parameter, None)  # the kernel changed nothing, but made it
        if not calibrating:
            self.step.buffers.restore()
            step_end.restore_scaler(context, self._scaler)
