"""Take back what a watched loop does to its schedule and scaler after a vetoed update."""

from __future__ import annotations

from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import ScheduleCopy, position
from stepguard.tensors.torch_private import pretend_stepped


class ScheduleRollback:
    """Schedule and scaler of one guard, from a vetoed update to the next one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._copy: ScheduleCopy | None = None
        self._seen: tuple[int, ...] | None = None
        self.every_step = True
        """False for a schedule that moves once an epoch: it does not count updates."""
        self.scaler = False
        """The scaler's next update must leave it as it is."""
        self._went_through = True

    def vetoed(self) -> None:
        """Inside optimizer.step(): what the loop does next counts as not done."""
        context = self._context
        if context.scheduler is not None:
            self._copy = ScheduleCopy(context.scheduler, context.optimizer)
            # where the scaler never called it: torch would warn of a schedule that moves before the
            # first update
            pretend_stepped(context.optimizer)
        self.scaler = context.scaling()

    def scaler_skipped(self) -> None:
        """Learn nothing from this step: careful loops leave their schedule alone after it."""
        self._went_through = False

    def moved(self) -> bool:
        """Has the loop moved the schedule since the last update?"""
        scheduler = self._context.scheduler
        if scheduler is None or self._seen is None:
            return True
        return position(scheduler) != self._seen

    def take_back(self, moved: bool | None = None) -> None:
        """Take back what the loop did after a veto; else learn from whether it `moved`."""
        if self._copy is None and moved is not None and self._went_through:
            self.every_step = moved
        if self._copy is not None and self.every_step:
            self._copy.restore()
        self._copy = None
        self.scaler = False
        self._went_through = True
        if self._context.scheduler is not None:
            self._seen = position(self._context.scheduler)
