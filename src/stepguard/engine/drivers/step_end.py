"""Bookkeeping once the fate of a step is known: hooks, history, budget, snapshots, journal."""

from __future__ import annotations

import math

from stepguard.engine.context import Context
from stepguard.engine.forecast_check import ForecastCheck
from stepguard.engine.looks import Looks
from stepguard.engine.protect import Protection
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.silent_check import SilentCheck
from stepguard.records import Reading
from stepguard.state.step import Step

ANCHOR_EVERY = 16
"""Committed steps between two remembered healthy batches."""


class UpdateNotCalled:
    """A step whose `optimizer.step()` the guard has not called: only buffers have moved."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def stop(self) -> None:
        """Nothing to stop: the guard does not call it."""

    def restore_buffers(self) -> None:
        self._context.put_back()


class StepEnd:
    """What a committed or a dropped step leaves behind, the same for every driver."""

    def __init__(self, context: Context, protect: Protection, rewinder: Rewinder) -> None:
        self._context = context
        self._protect = protect
        self._rewinder = rewinder
        self.looks = Looks(context, protect)
        self._silent = SilentCheck(context)
        self.looks.heard.append(self._silent.looked)
        self._forecast = ForecastCheck(context, self.looks.schedule)
        self.looks.heard.append(self._forecast.looked)

    def committed(self, step: Step, reading: Reading | None) -> None:
        """The update went through. `reading` is None where a disarmed guard did not read it."""
        for hook in self._context.commit_hooks:
            hook()
        # an infinity that the loss shows is not one that the model has absorbed
        self.looks.finish(committed=reading is None or not reading.loss_overflow)
        if reading is None or not self._protect.armed:
            return
        with self._protect.region:
            add_to_history(self._context, step, reading)
        with self._protect.part("comparison of the ranks"):
            for tell in self._context.step_hooks:
                tell(step)
        with self._protect.part("silent failures"):
            self._silent.committed(reading)
        with self._protect.part("forecast"):
            self._forecast.read(reading)
        with self._protect.part("journal"):
            write_step(self._context, reading, committed=True)
        with self._protect.part("snapshots"):
            self._rewinder.committed(reading.step + 1)

    def dropped(self, reading: Reading | None) -> None:
        """The update did not happen."""
        self.looks.finish(committed=False)
        if reading is None or not self._protect.armed:
            return
        if reading.overflow:
            with self._protect.part("forecast"):
                self._forecast.read(reading)
        with self._protect.part("journal"):
            write_step(self._context, reading, committed=False)

    def run_ended(self, error: BaseException | None) -> None:
        """Nothing more will come. A run that an error cut short says little about its loop."""
        if error is None:
            with self._protect.part("silent failures"):
                self._silent.run_ended()


def add_to_history(context: Context, step: Step, reading: Reading) -> None:
    """Learn from a healthy step what this run looks like."""
    context.history.add(reading)
    context.overflows_in_a_row = 0
    if reading.scale is not None:
        context.worked_scale = max(reading.scale, context.worked_scale or 0.0)
    context.budget = context.budget.committed()
    if context.outliers is not None:
        context.outliers.committed()
    done = context.history.committed
    if done < ANCHOR_EVERY or done % ANCHOR_EVERY == 1 or context.anchor is None:
        keep_anchor(context, step, reading)


def keep_anchor(context: Context, step: Step, reading: Reading) -> None:
    """Remember this step as healthy, so that its batch can be tried on later weights."""
    loss = reading.judged_loss
    if step.replayable and loss is not None and math.isfinite(loss):
        context.anchor = (step, loss)


def write_step(context: Context, reading: Reading, *, committed: bool) -> None:
    """Write the one line of this step."""
    if reading.overflow:
        context.overflows_in_a_row += 1
    context.outputs.step(reading, committed=committed)
