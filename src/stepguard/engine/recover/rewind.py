"""Go back to a snapshot or checkpoint of this run, the same one on every rank."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.incident.run_facts import micro_batch_words
from stepguard.engine.recover.snapshots import KeptStep, SnapshotKeeper, wait_for_copies
from stepguard.engine.result import StepResult
from stepguard.judge.decide import NOTHING_GOOD, RewindData, RewindPlan, RewindTarget, next_rewind
from stepguard.judge.history import LR_JUMP, history_from
from stepguard.judge.judge import Comparison
from stepguard.ranks.agreement import RankFault
from stepguard.ranks.copies import PeerHealing
from stepguard.records import Decision, Incident, Origin
from stepguard.report.phrases import number
from stepguard.state.batch import (
    LossFn,
    Step,
    batch_without,
    sample_count,
    samples_in,
    tree_from_json,
)
from stepguard.state.isolation import reevaluate, rerun
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.run_state import SavedState
from stepguard.state.snapshot import Snapshot

# --- Run earlier steps on earlier weights: is it the weights, the batch or the loss function?


def loss_function_changed(snapshots: SnapshotKeeper) -> bool:
    """Does no earlier step give its old loss on its old weights? False where none can be run.

    One snapshot that does is enough: another one may have been taken after the damage.
    """
    changed = False
    for snapshot, kept in _repeatable(snapshots, snapshots.ring.snapshots):
        with snapshots.run_state.parameters_from(snapshot.state):
            loss = reevaluate(kept.step)
        if kept.same(loss):
            return False
        changed = True
    return changed


def compare_with_best(context: Context, snapshots: SnapshotKeeper, step: Step) -> Comparison | None:
    """Run an earlier step and this one on the best weights this run had; None where impossible."""
    sign = -1.0 if context.maximizes else 1.0
    for snapshot, kept in _repeatable(snapshots, _best_first(snapshots)):
        if snapshot.step >= step.index:
            continue
        assert kept.loss is not None
        with snapshots.run_state.parameters_from(snapshot.state):
            again = sign * reevaluate(kept.step)
            this_then = sign * reevaluate(step)
        return Comparison(
            step=snapshot.step,
            then=sign * kept.loss,
            again=again,
            now=sign * reevaluate(kept.step),
            this_then=this_then,
        )
    return None


def _best_first(snapshots: SnapshotKeeper) -> list[Snapshot]:
    """Good snapshots whose level of the loss is known, the lowest first."""
    levelled: list[Snapshot] = []
    for snapshot in snapshots.ring.good():
        if snapshot.memory["level"] is not None and not snapshot.memory["diverged"]:
            levelled.append(snapshot)
    return sorted(levelled, key=lambda snapshot: float(snapshot.memory["level"]))


def _repeatable(
    snapshots: SnapshotKeeper, candidates: list[Snapshot]
) -> Iterator[tuple[Snapshot, KeptStep]]:
    """Sound snapshots with the step that began from each, where it can be run again."""
    for snapshot in candidates:
        kept = snapshots.kept.at(snapshot.step)
        if kept is None or kept.loss is None:
            continue
        if snapshots.probation.sound(snapshot):
            yield snapshot, kept


# --- Leave out what is proven guilty: a bad step without its bad rows or micro-batches.


def proven_guilty(step: Step, incident: Incident) -> str:
    """Describe the part of the step that can be dropped; empty if that is all of it."""
    reading = incident.reading
    if reading.bad_state or reading.overflow:
        return ""
    samples = _sample_words(step, incident)
    if samples:
        return samples
    count = len(step.micro_batches)
    guilty = reading.bad_micro_batches
    if count == 1 or len(guilty) == count:
        return ""
    if not guilty:
        return "a micro-batch"
    return micro_batch_words(guilty, count)


def _sample_words(step: Step, incident: Incident) -> str:
    origin = incident.origin
    if origin is None or not _can_lose(step, origin):
        return ""
    said = "samples " if len(origin.samples) > 1 else "sample "
    said += ", ".join(map(str, origin.samples))
    count = len(step.micro_batches)
    if count > 1:
        said += f" of micro-batch {(origin.micro_batch or 0) + 1} of {count}"
    return said


def share_of(step: Step, incident: Incident) -> float:
    """Share of the step's samples that is lost without what is proven guilty."""
    counts = [max(sample_count(batch), 1) for batch in step.micro_batches]
    origin = incident.origin
    if origin is not None and _can_lose(step, origin):
        return len(origin.samples) / sum(counts)
    guilty = incident.reading.bad_micro_batches or (0,)
    return sum(counts[index] for index in guilty) / sum(counts)


def without_samples(step: Step, incident: Incident) -> Step | None:
    """The step without its guilty rows; None where it is not finite then or cannot be cut."""
    origin = incident.origin
    if origin is None or not origin.samples:
        return None
    micro = origin.micro_batch or 0
    batches: list[Any] = list(step.micro_batches)
    batches[micro] = batch_without(batches[micro], origin.samples)
    if batches[micro] is None:
        return None
    rest = replace(step, micro_batches=tuple(batches))
    if not _finite(rest, range(len(batches))):
        return None
    return rest


def good_micro_batches(step: Step) -> list[int]:
    """Micro-batches whose loss and gradients are finite by themselves."""
    return [index for index in range(len(step.micro_batches)) if _finite(step, [index])]


def _can_lose(step: Step, origin: Origin) -> bool:
    """Are samples proven guilty, can their batch be cut, and is something left of it?"""
    if not origin.samples:
        return False
    count = samples_in(step.micro_batches[origin.micro_batch or 0])
    return count is not None and len(origin.samples) < count


def _finite(step: Step, micro: Sequence[int]) -> bool:
    try:
        again = rerun(step, micro=micro)
    except Exception:
        # the user's code cannot take such a batch
        return False
    return again.grads_finite and all(map(math.isfinite, again.losses))


# --- Read from the journal where earlier attempts of a run started, and how they ended.


SAME_PLACE = 2
"""Starts from one checkpoint that ended in a stop, after which an older one is taken."""


@dataclass(slots=True)
class PastAttempt:
    """One process's part of a run."""

    restored: str | None = None
    """Name of the checkpoint it began with; None for a fresh start."""
    stopped_at: int | None = None
    """The step at which the policy stopped it."""
    lost_steps: set[int] = field(default_factory=set)
    """Steps that were left out because of their data."""


@dataclass(frozen=True, slots=True)
class PastAttempts:
    """What earlier attempts of this run came to."""

    lost_steps: frozenset[int] = frozenset()
    """Steps that they left out."""
    stopped_at: frozenset[int] = frozenset()
    """Steps at which the policy stopped them."""


def past_of(attempts: list[PastAttempt]) -> PastAttempts:
    """Sum up all attempts."""
    lost: set[int] = set()
    stopped: set[int] = set()
    for attempt in attempts:
        lost |= attempt.lost_steps
        if attempt.stopped_at is not None:
            stopped.add(attempt.stopped_at)
    return PastAttempts(frozenset(lost), frozenset(stopped))


def attempts_in(journal: Path) -> list[PastAttempt]:
    """Every attempt in this journal, oldest first. Lines that cannot be read are passed over."""
    found: list[PastAttempt] = []
    for line in _lines(journal):
        if line.get("type") == "run":
            found.append(PastAttempt())
        elif found:
            _add(found[-1], line)
    return found


def failed_starts(attempts: list[PastAttempt], checkpoint: str) -> int:
    """How many attempts began with this checkpoint and were stopped by the policy."""
    failed = 0
    for attempt in attempts:
        if attempt.restored == checkpoint and attempt.stopped_at is not None:
            failed += 1
    return failed


def _add(attempt: PastAttempt, line: dict[str, Any]) -> None:
    kind = line.get("type")
    if kind == "note" and line.get("kind") == "restored":
        attempt.restored = str(line.get("checkpoint") or "") or None
    incident = line.get("incident")
    if kind == "incident" and isinstance(incident, dict):
        decision = incident.get("decision") or {}
        step = incident.get("step")
        if not isinstance(step, int):
            return
        stopped = decision.get("action") == "stop"
        if stopped:
            attempt.stopped_at = step
        if stopped or decision.get("left_out"):
            attempt.lost_steps.add(step)


def _lines(journal: Path) -> Iterator[dict[str, Any]]:
    """Headers, notes and incidents; the lines of healthy steps are not parsed."""
    if not journal.is_file():
        # a device may never end
        return
    try:
        with journal.open("rb") as lines:
            for line in lines:
                if b'"type":"step"' in line:
                    continue
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue
                if isinstance(fields, dict):
                    yield fields
    except OSError:
        return


# --- Plan a rewind: which states every rank can go back to, and which of them has not been tried.


class StateArchive(Protocol):
    """States on disk."""

    def steps(self) -> list[int]: ...
    def read(self, step: int) -> SavedState | None: ...


class RewindPlanner:
    """Chooses where to go back to, and remembers what has been tried."""

    def __init__(self, context: Context, snapshots: SnapshotKeeper) -> None:
        self._context = context
        self._snapshots = snapshots
        self._ring = snapshots.ring
        self._whole = snapshots.run_state
        self.archive: StateArchive | None = None
        """Checkpoints, for going further back than memory does."""
        self.tried: list[RewindPlan] = []
        self._repeated: dict[RewindPlan, int] = {}
        """Rewinds that repeat the steps exactly, with the step that had failed."""
        self.chosen: RewindPlan | None = None
        self._fetched: Snapshot | None = None
        """What was read from disk for the chosen plan."""

    def plan(
        self, offers: Sequence[dict[str, Any]], *, transient: bool, visible: bool
    ) -> tuple[RewindPlan | None, str]:
        """Choose the next rewind by what every rank offers; or say why there is none.

        `visible`: the damage is NaN or Inf. Any snapshot without is from before, so the newest of
        them loses least. Damage that cannot be seen asks for one that has proved good, else for one
        on probation from a good level.
        """
        # A repetition that led well past the step that failed may serve for another fault
        step = self._context.step
        for repeated, failed in list(self._repeated.items()):
            if step - failed > self._context.config.snapshots.probation:
                del self._repeated[repeated]
                self.tried.remove(repeated)
        before: list[RewindTarget] = []
        for standing in ("sound",) if visible else ("good", "young"):
            # the states that every rank has, newest first
            first, *others = [set(offer[standing]) for offer in offers]
            targets = sorted(first.intersection(*others), key=_newest_last, reverse=True)
            exact = transient and _repeatable_by_all(targets, offers)
            plan = next_rewind(targets, self.tried, repeatable=exact)
            if plan is not None:
                return plan, ""
            before += targets
        if not before:
            return None, NOTHING_GOOD
        steps = ", ".join(str(target.step) for target in before)
        return None, f"every rewind has been tried at step {steps}"

    def common(self, offers: Sequence[dict[str, Any]]) -> set[int]:
        """Steps of the undamaged states in memory that every rank has."""
        first, *others = [
            {target.step for target in offer["rewind"]["sound"] if target.kind == "snapshot"}
            for offer in offers
        ]
        return first.intersection(*others)

    def take(self) -> tuple[RewindPlan, Snapshot]:
        """Hand out the last plan, which counts as tried from now on, and the state it goes to."""
        plan = self.chosen
        fetched = self._fetched
        assert plan is not None, "a rewind is decided with a plan only"
        self.chosen = None
        self._fetched = None
        self.tried.append(plan)
        if plan.data == "repeat":
            self._repeated[plan] = self._context.step
        if plan.target.kind == "checkpoint" and fetched is not None:
            return plan, fetched
        for snapshot in self._ring.snapshots:
            if _target(snapshot) == plan.target:
                return plan, snapshot
        raise LookupError(f"the snapshot of step {plan.target.step} is gone")

    def forget(self) -> None:
        """Forget what was tried: another run begins."""
        self.tried.clear()
        self._repeated.clear()

    def fetch(self, plan: RewindPlan) -> dict[str, bool]:
        """Read the checkpoint of this plan; it is not there where it is damaged or does not fit."""
        self._fetched = None
        state = self.archive.read(plan.target.step) if self.archive is not None else None
        if state is not None and not self._whole.misfit(state, own_only=True):
            memory = {"anchor": None, "diverged": "", "size": None, "level": None}
            self._fetched = Snapshot(plan.target.step, 0, state, memory)
        return {"there": self._fetched is not None}

    def offer(self) -> dict[str, Any]:
        """What this rank can go back to: all undamaged states, and those from a good level."""
        probation = self._snapshots.probation
        sound = [s for s in self._ring.snapshots if probation.sound(s)]
        found: dict[str, Any] = {"sound": [_target(s) for s in sound], "good": [], "young": []}
        for snapshot in sound:
            if self._level_was_good(snapshot):
                standing = "good" if snapshot.standing == "good" else "young"
                found[standing].append(_target(snapshot))
        steps = self.archive.steps() if self.archive is not None else []
        for standing in ("sound", "good"):
            beside = {target.step for target in found[standing]}
            for step in steps:
                if step not in beside:
                    found[standing].append(RewindTarget(step=step, kind="checkpoint"))
        found["repeatable"] = self._repeatable([*(s.step for s in sound), *steps])
        return found

    def _repeatable(self, steps: Iterable[int]) -> list[int]:
        """Steps from which an exact repetition is possible."""
        # not where parameters came later: the first steps had no use for them
        grown = {s.step for s in self._ring.snapshots if self._whole.grown_since(s.state)}
        return [s for s in steps if s not in grown and self._snapshots.kept.since(s) is not None]

    def _level_was_good(self, snapshot: Snapshot) -> bool:
        """Was the loss near this run's best when the snapshot was taken?"""
        if self._snapshots.probation.exploded(snapshot):
            return False
        level = snapshot.memory["level"]
        history = self._context.history
        if level is None or history.best is None:
            return not snapshot.memory["diverged"]
        return bool(level <= history.progress.back_limit)


def _target(snapshot: Snapshot) -> RewindTarget:
    return RewindTarget(step=snapshot.step, timeline=snapshot.memory["timeline"])


def _newest_last(target: RewindTarget) -> tuple[int, str, int]:
    return target.step, target.kind, target.timeline


def _repeatable_by_all(targets: Sequence[RewindTarget], offers: Sequence[dict[str, Any]]) -> bool:
    return bool(targets) and all(targets[0].step in offer["repeatable"] for offer in offers)


# --- Go back to a snapshot or checkpoint of this run, the same one on every rank.


class Rewinder:
    """Plans and makes the rewinds of one guard. Owns its snapshots."""

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._context = context
        self.snapshots = SnapshotKeeper(context, clock=clock)
        self.probation = self.snapshots.probation
        self.planner = RewindPlanner(context, self.snapshots)
        self.start: Snapshot | None = None
        """Where the last rewind went."""
        self.left: list[KeptStep] = []
        """The steps that the last rewind took back."""
        self.healing = PeerHealing(context, partial(stored_trouble, context))
        self.common: set[int] | None = None
        """Steps of the undamaged snapshots that every rank has; None where that is not known."""
        self.retried = -1
        """The last step that was run a second time."""
        self.past = PastAttempts()
        """What earlier attempts of this run came to."""
        self.after_commit: list[Callable[[int], None]] = []
        self.after_rewind: list[Callable[[], None]] = []
        """Called when the state was replaced: for what holds numbers of the state that is gone."""
        self.before_stop: list[Callable[[Incident], Path | None]] = []
        """Called when the policy stops the run: each may save a state and say where."""

    def offer(self) -> dict[str, Any]:
        """What this rank can go back to."""
        if not self.snapshots.wanted:
            return {"sound": [], "good": [], "young": [], "repeatable": []}
        return self.planner.offer()

    def plan(
        self, offers: Sequence[dict[str, Any]], *, transient: bool, visible: bool
    ) -> tuple[RewindPlan | None, str]:
        """Choose where to go back to by what every rank offers; or say why that is not possible."""
        plan, why_not = self.planner.plan(offers, transient=transient, visible=visible)
        if self.snapshots.wanted and self.snapshots.off:
            why_not = f"{why_not} ({self.snapshots.off})"
        return plan, why_not

    def rewind(self) -> None:
        """Go where the last plan said.

        The random numbers are not put back: else a step would fail again by what it draws.
        """
        context = self._context
        came_from = context.step
        plan, self.start = self.planner.take()
        self.put_back(self.start)
        facts = {"step": came_from, "to": context.step, "data": plan.data, "lr": context.lr}
        since = f"the steps since are {DESCRIBED[plan.data]}"
        summary = f"rewound from step {came_from} to {plan.target.step}; {since}"
        context.outputs.line("rewind", {**facts, "kind": "rewind", "summary": summary})

    def heal(self, decision: Decision) -> Decision:
        """Give damaged ranks the state of healthy ones, as planned; where that fails, stop."""
        try:
            given = self.healing.heal()
        except Exception as fault:
            why = f"the healing failed ({type(fault).__name__}: {fault})"
            return replace(decision, action="stop", reason=why)
        for tell in self.after_rewind:
            tell()
        return replace(decision, reason=f"by rank {', '.join(map(str, given))}, which held a copy")

    def put_back(self, snapshot: Snapshot) -> None:
        """Make this snapshot the present state of the run, its random numbers left out."""
        context = self._context
        wait_for_copies()
        for trouble in self.snapshots.run_state.put_back(snapshot.state, own_only=True):
            self._context.outputs.note("rewind", trouble)
        own = tree_from_json(snapshot.state.facts["guard"], {})
        context.step = own["step"]
        context.history = history_from(own["history"])
        context.memory.anchor = snapshot.memory.get("anchor")
        self._bound_rates()
        self.probation.rewound(snapshot)
        self.left = self.snapshots.kept.take_since(snapshot.step)
        self.snapshots.ring.drop(lambda other: other.step > snapshot.step)
        self._restarted()

    def _bound_rates(self) -> None:
        """Lower a learning rate that is far above everything configured or seen."""
        context = self._context
        context.expect_declared_rates(context.lr)
        for group, ceiling in zip(context.optimizer.param_groups, context.lr_ceiling, strict=True):
            rate = group.get("lr")
            if rate is not None and float(rate) > LR_JUMP * ceiling:
                # capturable and compiled optimizers keep their rate in a tensor
                bounded = torch.full_like(rate, ceiling) if isinstance(rate, Tensor) else ceiling
                group["lr"] = bounded

    def forget(self) -> None:
        """Forget everything in memory: another state has been loaded."""
        self.snapshots.ring.drop(lambda _: True)
        self.snapshots.kept.broken(self._context.step - 1)
        self.probation.forget()
        self.planner.forget()
        self.retried = -1
        self._context.memory.anchor = None
        self._restarted()

    def _restarted(self) -> None:
        self._context.memory.missed = ""
        self.snapshots.restarted()
        for tell in self.after_rewind:
            tell()

    def left_behind(self, step: Step, loss: float | None) -> None:
        """This rank alone has refused an update: what it keeps from here on is not the others'."""
        self.probation.incident(step.index, hurt=True)
        # the others have made it: going back they run it again, and so does this rank
        self.snapshots.keep(step, loss)

    # --- when the policy stops the run

    def leave(self, incident: Incident) -> Path | None:
        """Save the newest good state before the run stops; where it lies, None if nowhere."""
        left: Path | None = None
        for save in self.before_stop:
            path = save(incident)
            if left is None:
                left = path
        return left

    def leave_good_in_memory(self) -> int | None:
        """Put the newest undamaged state back before the run stops, and say its step."""
        sound = [one for one in self.snapshots.ring.snapshots if self.probation.sound(one)]
        for snapshot in reversed(sound):
            if self.common is None or snapshot.step in self.common:
                self.put_back(snapshot)
                return snapshot.step
        return None


DESCRIBED: dict[RewindData, str] = {"repeat": "replayed unchanged", "skip": "dropped"}


# --- Run steps a second time: one that failed by chance, or those since a snapshot.


class Runs(Protocol):
    """A driver that runs steps itself."""

    context: Context
    rewinder: Rewinder

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult: ...


def run_again(
    runs: Runs, step: Step, incident: Incident | None, *, late: bool = False
) -> StepResult | None:
    """Run again what the decision asks for; the bad step's new result, None if it got none.

    `late`: the loop has drawn random numbers since, so they are put back afterwards.
    """
    decision = incident.decision if incident is not None else None
    if incident is None or decision is None:
        return None
    end = capture_rng() if late else None
    result = None
    if decision.action in ("retry", "heal"):
        # what a healed rank spoiled is run again on weights as they would have been
        runs.rewinder.retried = step.index
        with runs.rewinder.snapshots.paused():
            result = _once_more(runs, step)
    elif decision.data == "repeat":
        result = _repeat(runs, step)
    if end is not None:
        restore_rng(end)
    if result is None:
        return None
    return result.answering(incident)


def _repeat(runs: Runs, step: Step) -> StepResult | None:
    """Run the steps since the snapshot exactly as they were, then the one that failed."""
    rewinder = runs.rewinder
    start = rewinder.start
    assert start is not None
    with rewinder.snapshots.paused():
        for kept in rewinder.left:
            result = _once_more(runs, kept.step)
            missed = bool(runs.context.memory.missed)
            if result.incident is not None and not missed:
                # it failed again, which was an incident of its own with its own decision
                return None
            # what this rank alone has refused, all of them hear of in the next step
            why = _why_not_on(runs, kept, result, same=missed or kept.same(result.loss))
            if why:
                left = f"so the steps since {start.step} are dropped instead"
                runs.context.outputs.note("rewind", f"{why}, {left}")
                runs.rewinder.put_back(start)
                return None
        return _once_more(runs, step)


def _why_not_on(runs: Runs, kept: KeptStep, result: StepResult, *, same: bool) -> str:
    """What keeps the ranks from running the next step again, too; empty if nothing does.

    A rank that went back once more alone would be waited for by the others.
    """
    agreement = runs.context.agreement
    try:
        told = agreement.together(lambda: {"same": same}, "a step that was run again")
    except RankFault as fault:
        return f"the ranks could not agree about steps that are replayed ({fault})"
    if all(facts["same"] for facts in told):
        return ""
    return (
        f"step {kept.step.index} gave loss {number(kept.loss)}, and {number(result.loss)} when "
        f"replayed: its loss function depends on more than the batch it is given"
    )


def _once_more(runs: Runs, step: Step) -> StepResult:
    assert step.loss_fn is not None and step.start is not None
    runs.context.step = step.index
    restore_rng(step.start)
    result = runs.run(step.loss_fn, step.micro_batches)
    result.read()
    return result
