"""Fused optimizers: the device vetoes through `found_inf`, the host reads it one step later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.drivers.optimizer_kinds import found_inf, takes_found_inf
from stepguard.engine.drivers.outer_optimizer import voting_manager
from stepguard.engine.drivers.scaler import present_scale, restore_scaler, scaler_copy
from stepguard.engine.drivers.schedule import ScheduleCopy
from stepguard.engine.reader import Pending
from stepguard.engine.result import StepResult
from stepguard.engine.transaction import Transaction
from stepguard.records import Reading
from stepguard.sentinel.gradients import GradientMark
from stepguard.state.step import Step
from stepguard.tensors.torch_private import check_scaled_gradients


def read_later(context: Context) -> bool:
    """Is this update read one step later? Outliers must be known before the update."""
    if not takes_found_inf(context.optimizer) or voting_manager(context.outer) is not None:
        return False
    # where a scaler has set its own flag, the kernel decides in any case
    return context.outliers is None or found_inf(context.optimizer) is not None


def leaves_unscaling(context: Context) -> bool:
    """Does the kernel divide the gradients by the scale, as where a scaler calls the optimizer?

    Not where they are clipped before: a loop has to unscale them for that.
    """
    if context.scaler is None or not context.scaling() or context.config.clip_norm is not None:
        return False
    return read_later(context) and context.outer is None and not context.sharded


@contextmanager
def kernel_unscales(context: Context) -> Iterator[None]:
    """Give the kernel the scale that the gradients carry, where it is to divide by it."""
    if not leaves_unscaling(context):
        yield
        return
    assert context.scaler is not None
    check_scaled_gradients(context.scaler, context.optimizer)
    context.optimizer.grad_scale = present_scale(context)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del context.optimizer.grad_scale  # type: ignore[attr-defined]


class FusedUpdate:
    """An update that has been issued and whose verdict is not read yet."""

    def __init__(self, context: Context, step: Step, pending: Pending, result: StepResult) -> None:
        self.step = step
        self.pending = pending
        self.result = result
        self.flag = pending.suspect()
        """On the device: not 0 where the kernel leaves everything alone."""
        if not all(map(math.isfinite, pending.lr)):
            self.flag.fill_(1.0)
        self._schedule: ScheduleCopy | None = None
        if context.scheduler is not None:
            self._schedule = ScheduleCopy(context.scheduler, context.optimizer)
        self._scaler = scaler_copy(context)
        self._without_state: list[Tensor] = []
        state = context.optimizer.state
        if len(state) < len(context.parameters):
            self._without_state = [p for p in context.parameters if p not in state]
        self._gradients: GradientMark | None = None
        self._reading: Reading | None = None
        """The numbers, once they have been waited for."""

    def update(self, context: Context) -> None:
        """Step, unless the device finds something non-finite."""
        optimizer = context.optimizer
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        try:
            context.stepped.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def issued(self, context: Context) -> None:
        """The update is on its way; from now on the loop may drop the gradients."""
        self._gradients = GradientMark(context.parameters)

    def read(self, transaction: Transaction) -> Reading | None:
        """Wait for the numbers of this update; None where the guard is disarmed."""
        if not transaction.protect.armed:
            return None
        if self._reading is not None:
            return self._reading
        with transaction.protect.region:
            gone = self._gradients is not None and self._gradients.gone()
            self.step.grads_gone |= gone
            reading = transaction.read(self.pending, grads_gone=gone)
            self.step.scale = reading.scale or transaction.context.loss_scale
            self._reading = reading
            return reading
        return None

    def vetoed(self, reading: Reading) -> bool:
        """Did the device leave the parameters alone? The test of `Pending.suspect`, on the host."""
        if self.pending.overflow_passes and reading.loss_overflow:
            return False
        if reading.alarm or reading.bad_state or not all(map(math.isfinite, reading.lr)):
            return True
        seen = (reading.loss, reading.grad_norm, *reading.micro_losses)
        for value in (*seen, *reading.components.values()):
            if value is not None and not math.isfinite(value):
                return True
        return False

    def waits_for_ranks(self, transaction: Transaction) -> bool:
        """Was it refused, so that all ranks have to come to what is done about it?"""
        if transaction.context.agreement.size == 1:
            return False
        reading = self.read(transaction)
        return reading is not None and self.vetoed(reading)

    def take_back(self, context: Context, *, calibrating: bool, schedule: bool = True) -> None:
        """Undo what the host did on the assumption that the update would go through."""
        if self._schedule is not None and schedule:
            self._schedule.restore()
        for parameter in self._without_state:
            # the kernel changed nothing, but the optimizer made state for it
            context.optimizer.state.pop(parameter, None)
        if not calibrating:
            self.step.buffers.restore()
            context.attached.restore()
            restore_scaler(context, self._scaler)
