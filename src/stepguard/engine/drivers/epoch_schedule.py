"""`scheduler_every="epoch"`: the schedule advances when `guard.loader` ends a pass."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.lr_scheduler import ReduceLROnPlateau

from stepguard._errors import ConfigError
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import SeveralSchedules, advance
from stepguard.state.resumable_loader import ResumableLoader


class EpochSchedule:
    """Drives the schedule of one guard by passes. A plateau scheduler gets the mean loss of the
    pass.
    """

    def __init__(
        self, context: Context, feed: ResumableLoader | None, pass_ended: Callable[[], None]
    ) -> None:
        if feed is None:
            raise ConfigError(
                "GuardConfig(scheduler_every='epoch') needs to know where a pass over the data "
                "ends; give stepguard.Guard(..., loader=loader) and iterate over guard.loader, or "
                "use scheduler_every=None and call scheduler.step() in your loop."
            )
        self._context = context
        self._feed = feed
        feed.after_pass.append(pass_ended)
        scheduler = context.scheduler
        self._schedulers = (
            scheduler._schedulers if isinstance(scheduler, SeveralSchedules) else [scheduler]
        )
        self._ahead = self._count() - feed.epoch
        """How far the schedule was when the first pass began."""
        self._sum, self._losses = 0.0, 0

    def committed(self, done: int) -> None:
        """A step went through."""
        loss = self._context.history.last_loss
        if loss is not None:
            self._sum += -loss if self._context.maximizes else loss
            self._losses += 1

    def passed(self) -> None:
        """The loader has given its last batch."""
        for scheduler in self._schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                advance(scheduler)
            elif self._losses:
                scheduler.step(self._sum / self._losses)
        self._sum, self._losses = 0.0, 0

    def rewound(self) -> None:
        """A rewind takes the schedule back, but not the data: passes that are over stay over."""
        missing = self._ahead + self._feed.epoch - self._count()
        if missing < 0:  # another state was loaded
            self._ahead -= missing
        for _ in range(missing):
            for scheduler in self._schedulers:
                advance(scheduler)

    def _count(self) -> int:
        counts = [
            getattr(s, "last_epoch", 0)
            for s in self._schedulers
            if not isinstance(s, ReduceLROnPlateau)
        ]
        return max(counts, default=self._feed.epoch)
