"""What trials are run on: the bad step, the steps that led to it, and the objects to train."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from stepguard.records import Incident
from stepguard.state.run_state import RunState
from stepguard.state.snapshot import Snapshot
from stepguard.state.step import Step
from stepguard.state.steps_before import Window, WindowStep

MOST_AFTER = 8
MOST_HELD_OUT = 4
LEAST_STEPS = 2
"""Steps before the bad one without which nothing is known of a run that went well."""
SAME_LOSS = 1e-3
"""A loss that differs by less is the same."""


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


@dataclass(slots=True)
class TrialSubject:
    """The bad step, the way that led to it, and the objects to train."""

    step: Step
    bad: WindowStep
    window: Window
    run_state: RunState
    incident: Incident
    failed_before: list[WindowStep] = field(default_factory=list)
    """Bad steps shortly before or after, of a cause that no single sample brings: it may come
    again."""
    failed_next: int | None = None
    """The step after the bad one, where it failed as well."""

    @property
    def no_skip(self) -> str:
        """Why leaving the step out cannot be called a success, in words; empty where it can."""
        if self.bad.index < LEAST_STEPS:
            return "it cannot be tried: nothing was trained before the bad step"
        if not self.after:
            return "it cannot be tried: no other step of the run was kept"
        return ""

    @property
    def limit(self) -> float | None:
        """For a finite anomaly: a loss above it counts as bad from the bad step on.

        Half-way between the losses before the step and its own.
        """
        loss = self.incident.reading.loss
        if not self.incident.verdict.finite_anomaly or loss is None:
            return None
        before = [one.loss for one in self.window.steps if one.loss is not None]
        usual = statistics.median(before) if before else 0.0
        if usual >= loss:
            # the way to it was no better: then only what is clearly below it has helped
            usual = min(before)
        return min(usual + (loss - usual) / 2.0, loss - SAME_LOSS * abs(loss))

    @property
    def after(self) -> list[WindowStep]:
        """What is trained after the bad step: what really came, else the last steps before it."""
        later = [one for one in self.window.others if one.index > self.bad.index]
        room = MOST_AFTER - len(self.failed_before)
        chosen = later[:room]
        if not later:
            chosen = (self.window.steps or self.window.others)[-room:]
        return [*chosen, *self.failed_before]

    @property
    def held_out(self) -> list[WindowStep]:
        """Batches that no trial is trained on."""
        trained = {one.index for one in self.after}
        free = [one for one in self.window.others if one.index not in trained]
        return free[-MOST_HELD_OUT:]
