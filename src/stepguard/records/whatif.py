"""What would have helped: how each candidate fared on the steps that led to an incident."""

from __future__ import annotations

from dataclasses import dataclass

from stepguard.records.field_docs import documented


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """One candidate, trained on the steps before the incident, the bad step and those after."""

    name: str
    """Short and stable: `skip`, `lr x0.5`, `eps`."""
    label: str
    """What was changed, in words: `learning rate x0.5 (0.001 -> 0.0005)`."""
    cost: int
    """How much it changes a healthy run: less is better among candidates that do as well."""
    works: bool = False
    """The bad value did not come back, and the losses at the end are finite."""
    bad_step: int | None = None
    """The step in which it came back."""
    bad_value: str = ""
    """What was bad then: `loss is nan`."""
    loss: float | None = None
    """Mean loss of batches of the window on the weights at the end."""
    held_out: float | None = None
    """The same of batches that the trial was not trained on."""
    distance: float | None = None
    """How far its weights ended from the good state that all trials begin with, over their norm."""
    losses: tuple[float, ...] = ()
    """The loss of each step of the trial, in order."""
    steps: int = 0
    """Steps that were run for it, evaluations included as a third."""
    change: str = ""
    """What to change so that the next run has it."""
    value: float | None = None
    """The new epsilon or norm to clip to, where that is what is changed."""
    answers: tuple[str, ...] = ()
    """Codes of the incident's findings whose remedy this is."""
    why_not: str = ""
    """Why it could not be tried."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The candidates for one incident, the best first.

    For instance:

        print(guard.whatif().best.change)
    """

    incident: str
    """Id of the incident."""
    step: int
    """The bad step."""
    summary: str = ""
    """What was wrong with it."""
    first: int = 0
    """The step that the trials began with."""
    window: int = 0
    """Steps before the bad one that were trained again."""
    after: int = 0
    """Steps that were trained after it, to see whether the trouble is over."""
    held_out: int = 0
    """Batches that no trial was trained on."""
    outcomes: tuple[TrialOutcome, ...] = ()
    """The best first."""
    remarks: tuple[str, ...] = ()
    """What to know when reading the table."""

    @property
    def best(self) -> TrialOutcome | None:
        """The first one, if it works."""
        for outcome in self.outcomes[:1]:
            if outcome.works:
                return outcome
        return None

    @property
    def steps(self) -> int:
        """Steps that were run for all of it."""
        return sum(outcome.steps for outcome in self.outcomes)
