"""Tell what a healthy run does wrong: every silent failure once, as a line."""

from __future__ import annotations

import gc
from collections import deque
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stepguard.diagnose.silent import silent_findings
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import position, wants_a_value
from stepguard.records import Finding, Reading
from stepguard.records.look import Look

EVERY = 64
"""Steps between two checks that need no look."""
MOST_LOOKS = 64
SAME_BATCH = "SG907"
FADED = 1e-4
"""Learning rate, beside the highest of its group, at which nothing moves any more."""


class SilentCheck:
    """Keeps what the rules on healthy runs need, and tells each code once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._looks: deque[Look] = deque(maxlen=MOST_LOOKS)
        self._recent: deque[Reading] = deque(maxlen=EVERY)
        self._told: set[str] = set()
        self._steps = 0
        self._schedule = _place(context.scheduler)
        """Where the schedule stood when the guard was made; None where it cannot be told."""
        self._rates: tuple[float, ...] = ()
        """Learning rates of the newest step."""
        self._highest: tuple[float, ...] = ()
        self._faded_since: int | None = None
        self._first: Reading | None = None
        self._look_is_new = False
        """It is judged with the reading of its step, which comes after it."""

    def committed(self, reading: Reading) -> None:
        """A step went through."""
        self._recent.append(reading)
        self._steps += 1
        self._first = self._first or reading
        if reading.lr != self._rates:
            self._rates_changed(reading)
        if self._look_is_new or self._steps % EVERY == 0:
            self._check()

    def _rates_changed(self, reading: Reading) -> None:
        """Remember the highest rates, and since when the present ones are nothing beside them."""
        before = self._highest
        self._rates = reading.lr
        if len(before) != len(reading.lr):
            before = reading.lr
        self._highest = tuple(map(max, before, reading.lr))
        pairs = zip(reading.lr, self._highest, strict=True)
        if not all(rate < FADED * highest for rate, highest in pairs):
            self._faded_since = None
        elif self._faded_since is None:
            self._faded_since = reading.step

    def looked(self, look: Look) -> None:
        """A deep look was taken."""
        self._looks.append(look)
        self._look_is_new = True

    def run_ended(self) -> None:
        """The run is over, and by itself: only now is late what happens once an epoch."""
        stood = self._schedule is not None and _place(self._context.scheduler) == self._schedule
        self._check(ended=True, schedule_stood_for=self._steps if stood else 0)

    def _check(self, *, ended: bool = False, schedule_stood_for: int = 0) -> None:
        self._look_is_new = False
        first = self._first or Reading(step=0)
        found = silent_findings(
            self._looks,
            self._recent,
            ended=ended,
            schedule_stood_for=schedule_stood_for,
            habits=self._context.habits.counts,
            faded_since=self._faded_since,
            first_norm=first.grad_norm,
            first_loss=abs(first.loss) if first.loss is not None else None,
            shrinks_by=_shrinks_by(self._context.optimizer),
        )
        for finding in found:
            if finding.code not in self._told:
                self._told.add(finding.code)
                samples = self._looks[-1].facts.samples if self._looks else 0
                if finding.code != SAME_BATCH or not _whole_data_set_in_a_batch(samples):
                    self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        text = f"{finding.code} {finding.title}: {'; '.join(finding.evidence)}"
        self._context.outputs.note(
            "silent",
            f"{text} (stepguard explain {finding.code})",
            code=finding.code,
            certainty=finding.certainty,
        )


def _shrinks_by(optimizer: Optimizer) -> float:
    """Learning rate times weight decay, where the decay is not a part of an adapted gradient."""
    largest = 0.0
    with suppress(Exception):  # settings of the user's own optimizer may be anything
        for group in optimizer.param_groups:
            plain = "betas" not in group and "eps" not in group
            if plain or group.get("decoupled_weight_decay") or type(optimizer).__name__ == "AdamW":
                largest = max(largest, float(group["lr"]) * float(group.get("weight_decay", 0.0)))
    return largest


def _whole_data_set_in_a_batch(samples: int) -> bool:
    """Is there a loader with all of its data in a batch of this size? Then it is the same again.

    Looked for once in a run at most, and only where the finding would be reported.
    """
    gc.collect()
    for thing in gc.get_objects():
        # type() and not isinstance: proxies answer isinstance with side effects
        if issubclass(type(thing), DataLoader):
            with suppress(Exception):  # a data set without a length, or of the user's own
                if len(thing) == 1 and len(thing.dataset) == samples:
                    return True
    return False


def _place(scheduler: Any) -> tuple[int, ...] | None:
    """How far a schedule has come that the loop should step; a plateau's may well never move."""
    with suppress(Exception):  # an object of the user's own
        if scheduler is not None and not wants_a_value(scheduler):
            return position(scheduler)
    return None
