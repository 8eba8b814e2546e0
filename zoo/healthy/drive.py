"""The same training bare and guarded, in one process, from one seed: what did the guard change?"""

from __future__ import annotations

import json
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import stepguard
from stepguard.engine.drivers.schedule import needs_closure
from zoo.healthy.same import differences, state_of
from zoo.healthy.training import Calls, Family, Learner, Training, Update

Anomalies = Literal["note", "act", "off"]
MOST_NAMED = 5
LOOPED = ("step", "watch")
"""Ways in whose loop is this file's."""
EVERY_SO_OFTEN = 4
"""One seed in so many has a run folder as well."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the guard did to one healthy run. Everything but `notes` and `warnings` should be
    nothing.
    """

    family: str
    seed: int
    steps: int
    anomalies: Anomalies = "note"
    """What the guard was told to do about finite anomalies."""
    look_every: int | Literal["auto"] = "auto"
    silent: list[str] = field(default_factory=list)
    """Codes of silent failures that were told, in runs with a folder."""
    interventions: dict[str, int] = field(default_factory=dict)
    """Vetoes, rewinds, halts and the like, by name."""
    extra_calls: int = 0
    """Calls of the loss function or the model that the bare run did not make."""
    unequal: list[str] = field(default_factory=list)
    """Parts of the final state that are not bit for bit those of the bare run."""
    refused_saves: int = 0
    """Guards that did not call the final state good, in runs with a folder."""
    notes: int = 0
    """Anomalies that were told and not acted on; those that are no incident are counted in runs
    with a folder.
    """
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    cpu_seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.interventions or self.extra_calls or self.unequal or self.error)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def compare(family: Family, seed: int, steps: int, anomalies: Anomalies = "note") -> Outcome:
    """One run of the family without a guard and one with it."""
    outcome = Outcome(family=family.name, seed=seed, steps=steps, anomalies=anomalies)
    began = time.process_time()
    bare = run_bare(family, seed, steps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            guarded = run_guarded(family, seed, steps, outcome)
        except Exception as fault:
            outcome.error = f"{type(fault).__name__}: {fault}"
            return outcome
    outcome.warnings = sorted({str(w.message)[:200] for w in told if "stepguard" in str(w.message)})
    outcome.extra_calls = sum(guarded[0]) - sum(bare[0])
    outcome.unequal = list(differences(bare[1], guarded[1]))[:MOST_NAMED]
    outcome.cpu_seconds = time.process_time() - began
    return outcome


Left = tuple[tuple[int, int], dict[str, Any]]
"""Calls of loss and model, and the final state."""


def run_bare(family: Family, seed: int, steps: int) -> Left:
    if family.way not in LOOPED:
        return family.build(seed, steps, None)  # type: ignore[no-any-return]
    seed_all(seed)
    training, calls = family.build(seed), Calls()
    calls.count(training)
    loop(training, steps, {name: plain(learner) for name, learner in training.learners.items()})
    calls.stop()
    return (calls.loss, calls.forward), state_of(training)


def run_guarded(family: Family, seed: int, steps: int, outcome: Outcome) -> Left:
    if family.way not in LOOPED:
        return family.build(seed, steps, outcome)  # type: ignore[no-any-return]
    seed_all(seed)
    training, calls = family.build(seed), Calls()
    calls.count(training)
    guards: list[stepguard.Guard] = []
    with ExitStack() as stack:
        folder = None
        if seed % EVERY_SO_OFTEN == 0:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stepguard-harmless-"))
        drivers = {}
        for name, learner in training.learners.items():
            own = _guards(family.way, learner, folder and f"{folder}/{name}", outcome)
            guards += [stack.enter_context(guard) for guard in own]
            drivers[name] = _stepped(own[0], learner) if family.way == "step" else plain(learner)
        try:
            loop(training, steps, drivers)
        except stepguard.TrainingHalted:
            outcome.interventions["halt"] = 1
        left = (calls.loss, calls.forward), state_of(training)
        calls.stop()
        if folder is not None:
            outcome.refused_saves = sum(guard.save() is None for guard in guards)
            outcome.notes += notes_in(Path(folder))
            outcome.silent = silent_codes(Path(folder))
    tally(outcome, guards)
    return left


def notes_in(folder: Path) -> int:
    """Lines about finite anomalies in the journals of a run."""
    return sum(record.get("kind") in ("spike", "drift") for record in notes_of(folder))


def silent_codes(folder: Path) -> list[str]:
    """Codes of silent failures in the journals of a run, and `metric` for a metric-only one."""
    kinds = ("silent", "metric")
    return sorted({str(n.get("code", n["kind"])) for n in notes_of(folder) if n["kind"] in kinds})


def notes_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Every note in the journals below a folder."""
    for journal in folder.rglob("journal.jsonl"):
        for line in journal.read_text("utf-8").splitlines():
            record = json.loads(line)
            if record["type"] == "note":
                yield record


def tally(outcome: Outcome, guards: Iterable[Any]) -> None:
    """Count what the guards did."""
    done = Counter(outcome.interventions)
    for guard in guards:
        for incident in guard.incidents:
            action = incident.decision.action if incident.decision is not None else "undecided"
            if action in ("note", "warn"):
                outcome.notes += 1
            else:
                done[f"{action} ({incident.verdict.kind})"] += 1
        if not getattr(guard, "armed", True):
            done["disarmed"] += 1
    outcome.interventions = dict(done)


def loop(training: Training, steps: int, drivers: dict[str, Callable[..., None]]) -> None:
    for step in range(steps):
        update: Update
        for update in training.updates(step):
            name, batches = update
            drivers[name](*batches)


def plain(learner: Learner) -> Callable[..., None]:
    """The update as people write it."""
    if needs_closure(learner.optimizer):
        return lambda *batches: _with_closure(learner, batches)
    if learner.scaler is not None:
        return lambda *batches: _scaled(learner, learner.scaler, batches)

    def update(*batches: Any) -> None:
        optimizers = (learner.optimizer, *learner.further)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in batches:
            torch.autograd.backward(total(learner.loss(batch)))
        _clip(learner)
        for optimizer in optimizers:
            optimizer.step()
        _advance(learner)

    return update


def _scaled(learner: Learner, scaler: Any, batches: tuple[Any, ...]) -> None:
    learner.optimizer.zero_grad()
    for batch in batches:
        torch.autograd.backward(scaler.scale(total(learner.loss(batch))))
    if learner.unscales:
        scaler.unscale_(learner.optimizer)
        _clip(learner)
    scaler.step(learner.optimizer)
    scaler.update()
    _advance(learner)


def _with_closure(learner: Learner, batches: tuple[Any, ...]) -> None:
    def closure() -> Tensor:
        learner.optimizer.zero_grad()
        losses = [total(learner.loss(batch)) for batch in batches]
        for loss in losses:
            torch.autograd.backward(loss)
        return torch.stack([loss.detach() for loss in losses]).sum()

    learner.optimizer.step(closure)
    _advance(learner)


def total(loss: Tensor | dict[str, Tensor]) -> Tensor:
    return sum(loss.values(), torch.zeros(())) if isinstance(loss, dict) else loss


def _clip(learner: Learner) -> None:
    if learner.clip is not None:
        owned = [p for group in learner.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(owned, learner.clip)


def _advance(learner: Learner) -> None:
    if learner.scheduler is not None:
        learner.scheduler.step()


def _guards(
    way: str, learner: Learner, run_dir: str | None, outcome: Outcome
) -> list[stepguard.Guard]:
    """One an optimizer, with default settings as a new user has them."""
    settings: dict[str, Any] = {
        "terminal": "quiet",
        "probes": stepguard.Probes(anomalies=outcome.anomalies, look_every=outcome.look_every),
    }
    if way == "step":
        settings["clip_norm"] = learner.clip
    make = stepguard.Guard if way == "step" else stepguard.watch
    made = []
    for number, optimizer in enumerate((learner.optimizer, *learner.further)):
        own = f"{run_dir}-{number}" if run_dir is not None else None
        made.append(
            make(
                learner.model,
                optimizer,
                scheduler=learner.scheduler if not number else None,
                scaler=learner.scaler if learner.scaler_handed_over else None,
                modules=learner.modules,
                config=stepguard.GuardConfig(**settings, run_dir=own),
            )
        )
    return made


def _stepped(guard: stepguard.Guard, learner: Learner) -> Callable[..., None]:
    def update(*batches: Any) -> None:
        guard.step(learner.loss, *batches)

    return update
