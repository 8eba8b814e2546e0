"""What plug-ins are given: the moments of a step, and the way that led to a bad one.

The engine knows these hooks and no plug-in; the guard puts them in (`stepguard.probes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stepguard.records import Reading
from stepguard.state.batch import Step
from stepguard.state.capsule import WindowStep
from stepguard.state.snapshot import Snapshot


class StepProbe:
    """Called at each moment of every step. Nothing happens here."""

    def begin(self) -> None:
        """The next step is about to begin."""

    def saw_batch(self, batch: Any) -> None:
        """The data of the step, or of one call of the model."""

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass begins at this loss."""

    def backward_over(self) -> None:
        """A backward pass of the loop is over; others may follow before the update."""

    def gradients_ready(self) -> None:
        """Forward and backward are over: what follows is the guard's work."""

    def before_update(self) -> None:
        """The optimizer steps next."""

    def finish(self, *, committed: bool) -> None:
        """The step is over, read or not."""

    def committed(self, reading: Reading) -> None:
        """The update of a step that was read went through."""

    def skipped(self, reading: Reading) -> None:
        """A GradScaler skipped the update."""

    def run_ended(self) -> None:
        """The run is over, and no error has cut it short."""

    def close(self) -> None:
        """The step at hand will not be finished."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work of the guard in the middle of the user's step."""
        yield

    @contextmanager
    def during(self, batch: Any) -> Iterator[None]:
        """Around forward and backward of a step that the guard runs."""
        self.begin()
        self.saw_batch(batch)
        try:
            yield
        except BaseException:
            self.close()
            raise
        self.gradients_ready()


@dataclass(slots=True)
class LeadUp:
    """What a guard keeps of its last bad step, by reference."""

    incident: str
    """Id of the incident."""
    step: Step
    bad: WindowStep
    timeline: int
    """Rewinds that the run had made by then."""
    snapshot: Snapshot | None = None
    """Where the steps began; None: with the bad step itself."""
    steps: list[WindowStep] = field(default_factory=list)
    """Those since the snapshot, without the bad one."""
    earlier: list[WindowStep] = field(default_factory=list)
    """Healthy steps from before the snapshot."""
    failed_before: list[WindowStep] = field(default_factory=list)
    """Bad steps shortly before this one, oldest first."""
    committed: int = 0
    """Updates that the run had made by then."""
    first: LeadUp | None = None
    """The first bad step of a chain of them, with no good one between."""
