"""Train one of the forecast's trainings under a guard until it fails, and keep what was told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.parts.trainings import Kind
from stepguard import Guard, GuardConfig, Probes, Snapshots, TrainingHalted
from stepguard.records import Incident, Reading, Sink


@dataclass
class Outcome:
    """One run."""

    kind: str
    seed: int
    steps: int = 0
    failed: int | None = None
    """Step at which it broke."""
    why: str = ""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Forecasts, as the journal has them."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Ears(Sink):
    """Hears what the guard tells."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def step(self, reading: Reading, committed: bool) -> None:
        self._outcome.losses.append(math.nan if reading.loss is None else reading.loss)
        self._outcome.norms.append(math.nan if reading.grad_norm is None else reading.grad_norm)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if fields.get("kind") == "forecast":
            self._outcome.told.append(dict(fields))


def train(kind: Kind, seed: int, look_every: int | Literal["auto"] | None) -> Outcome:
    """One run up to its failure or its end."""
    training = kind.begin(seed)
    outcome = Outcome(kind.name, seed)
    config = GuardConfig(
        probes=Probes(look_every=look_every, locate_budget=0),
        terminal="quiet",
        snapshots=Snapshots(count=0),
        sinks=(Ears(outcome),),
    )
    guard = Guard(
        training.model,
        training.optimizer,
        scaler=training.scaler,
        config=config,
    )
    with guard:
        for step in range(kind.steps):
            training.before_step(step)
            outcome.why = training.broken()
            if outcome.why:
                outcome.failed = step
                break
            try:
                result = guard.step(training.loss, training.batch(step))
            except TrainingHalted as halted:
                outcome.failed, outcome.why = step, halted.incident.verdict.summary
                break
            outcome.steps = step + 1
            incident = result.incident
            # a finite anomaly is only told: the run goes on as the bare one would
            if incident is not None and not only_told(incident):
                outcome.failed = step
                outcome.why = incident.verdict.summary
                break
    return outcome


def only_told(incident: Incident) -> bool:
    """Nothing was done about it."""
    return incident.decision is not None and incident.decision.action == "note"


FEWEST = 10
"""Steps that a simple rule learns from before it warns."""
TIMES = 10.0
SIGMAS = 6.0


def first_norm_above(outcome: Outcome) -> list[int]:
    """Where the gradient norm is above ten times its median so far. As such rules are used, each
    stretch counts once.
    """
    steps = []
    above = False
    for step in range(FEWEST, len(outcome.norms)):
        now = outcome.norms[step] > TIMES * statistics.median(outcome.norms[:step])
        if now and not above:
            steps.append(step)
        above = now
    return steps


def first_loss_above(outcome: Outcome) -> list[int]:
    """Where the loss is more than six standard deviations above its mean of the last 50 steps."""
    steps = []
    above = False
    for step in range(FEWEST, len(outcome.losses)):
        past = outcome.losses[max(0, step - 50) : step]
        now = outcome.losses[step] > statistics.fmean(past) + SIGMAS * statistics.pstdev(past)
        if now and not above:
            steps.append(step)
        above = now
    return steps
