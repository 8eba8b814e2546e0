"""Snapshots of the whole state, in memory, and the steps since, so that they can be run again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from stepguard.checkpoints import Select
from stepguard.engine.context import Context
from stepguard.engine.incident.run_facts import update_ratio
from stepguard.judge.history import EXPLODED, LEAST_SIZE, SUDDEN, Weights, history_facts
from stepguard.sentinel.gradients import root_mean_square
from stepguard.state.batch import Step, tensors_in, tree_to_json
from stepguard.state.buffers import AttachedState
from stepguard.state.run_state import RunState, SavedState
from stepguard.state.snapshot import Cadence, Ring, Snapshot
from stepguard.tensors.names import TensorPart, dotted, whole_part
from stepguard.tensors.values import VERSION, is_finite, written_since

# --- Keep the steps since the last good snapshots, by reference, so that they can be run again.


MOST_STEPS = 512
RANDOM_NUMBERS = 32 * 1024
"""Bytes that the states of the generators take, roughly, for each micro-batch."""
SAME_LOSS = 1e-3
"""Relative difference up to which two losses of one step differ only by the order of additions."""


@dataclass(slots=True)
class KeptStep:
    """A step that went through, its loss, and marks that show whether its batch was written to."""

    step: Step
    loss: float | None
    size: int
    tensors: list[Tensor]
    marks: list[int]
    lr: tuple[float, ...] = ()
    """The rates it was trained with."""

    @property
    def intact(self) -> bool:
        return not written_since(self.tensors, self.marks)

    def same(self, loss: float | None) -> bool:
        """Is this the loss it had the first time?"""
        if loss is None or self.loss is None:
            return loss is self.loss
        return math.isclose(loss, self.loss, rel_tol=SAME_LOSS, abs_tol=1e-12)


class KeptSteps:
    """The last steps, as many as fit into `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kept: deque[KeptStep] = deque()
        self._complete_from = 0
        """Every step from here on is kept, but for those that had no effect."""

    def keep(self, step: Step, loss: float | None, lr: tuple[float, ...] = ()) -> None:
        if step.loss_fn is None or not self._limit:
            self.broken(step.index)
            return
        tensors = tensors_in(step.micro_batches)
        size = RANDOM_NUMBERS * len(step.micro_batches)
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
        self._kept.append(KeptStep(step, loss, size, tensors, list(map(VERSION, tensors)), lr))
        self._size += size
        while self._kept and (self._size > self._limit or len(self._kept) > MOST_STEPS):
            self._complete_from = self._drop_oldest() + 1

    def broken(self, index: int) -> None:
        """Drop everything: this step changed the state and cannot be run again as it was."""
        self._kept.clear()
        self._size = 0
        self._complete_from = index + 1

    def forget_before(self, step: int) -> None:
        """Drop the steps before this one: no rewind goes back further."""
        while self._kept and self._kept[0].step.index < step:
            self._drop_oldest()
        self._complete_from = max(self._complete_from, step)

    def at(self, step: int) -> KeptStep | None:
        """This very step, if its batch is still as it was."""
        for kept in self._kept:
            if kept.step.index == step and kept.intact:
                return kept
        return None

    def intact(self) -> list[KeptStep]:
        """Every kept step whose batch is still as it was, oldest first."""
        return [kept for kept in self._kept if kept.intact]

    def since(self, step: int) -> list[KeptStep] | None:
        """The steps from this one on; None where some of them are missing or were written to."""
        if self._complete_from > step:
            return None
        found: list[KeptStep] = []
        for kept in self._kept:
            if kept.step.index >= step:
                if not kept.intact:
                    return None
                found.append(kept)
        return found

    def take_since(self, step: int) -> list[KeptStep]:
        """Take out the steps from this one on: the run has gone back before them."""
        taken = [kept for kept in self._kept if kept.step.index >= step]
        for kept in taken:
            self._kept.remove(kept)
            self._size -= kept.size
        self._complete_from = min(self._complete_from, step)
        return taken

    def _drop_oldest(self) -> int:
        oldest = self._kept.popleft()
        self._size -= oldest.size
        return oldest.step.index


# --- Judge snapshots: one is good once a number of healthy steps have followed it.


class Probation:
    """Which snapshots of one guard are good, young or bad."""

    def __init__(self, context: Context, run_state: RunState, ring: Ring) -> None:
        self._context = context
        self._run_state = run_state
        self._ring = ring
        self.incident_at = -1
        """The step of the last incident."""
        self.hurt_at: int | None = None
        """The last step that found the weights hurt, where nothing was done about it."""
        self._diverged: tuple[int | None, str] | None = None
        """The judgement in words, with `History.diverged_at` at that moment; None: not diverged."""

    def commit(self, done: int) -> None:
        """Promote or reject the snapshots whose probation ends after `done` steps."""
        began = self._context.history.diverged_at
        since = 0 if began is None else done - began
        if self._diverged is not None and self._diverged[0] not in (None, began):
            self.divergence()
        elif 0 < since <= SUDDEN and since & (since - 1) == 0:
            # measuring reads every weight: rarely, and soon enough for what is sudden
            self.divergence()
        for snapshot in self._ring.snapshots:
            if snapshot.standing != "young":
                continue
            if done - snapshot.watched_from < self._context.config.snapshots.probation:
                continue
            why = snapshot.memory["diverged"] or self._judged(snapshot.memory["size"])
            snapshot.memory["diverged"] = why
            snapshot.standing = "bad" if why else "good"
            self._ring.keep_best()

    def incident(self, step: int, *, hurt: bool) -> None:
        """Restart every probation. `hurt`: the weights are damaged, and since when is unknown."""
        self.incident_at = step
        if hurt:
            self.hurt_at = step
        for snapshot in self._ring.snapshots:
            if snapshot.standing == "young":
                snapshot.memory["hurt"] = hurt
                snapshot.watched_from = step + 1
                if hurt:
                    snapshot.standing = "bad"

    def rewound(self, snapshot: Snapshot) -> None:
        """Continue from this snapshot: put it to the test again."""
        self.hurt_at = None
        self.incident_at = min(self.incident_at, snapshot.step - 1)
        if snapshot.standing == "bad":
            # the incident took every young one for bad; this one is put to the test
            snapshot.standing = "young"
            snapshot.watched_from = snapshot.step

    def forget(self) -> None:
        """Forget incidents and divergence: another state has been loaded."""
        self._diverged = None
        self.hurt_at = None
        self.incident_at = -1

    # --- what one snapshot is worth

    def sound(self, snapshot: Snapshot) -> bool:
        """Is it finite, but for what was never meant to be, and does it fit the live objects?"""
        if "sound" not in snapshot.memory:
            wait_for_copies()
            bad = {name for name, tensor in snapshot.state.tensors.items() if not is_finite(tensor)}
            snapshot.memory["sound"] = bad <= self.meant_nonfinite(bad)
        if not snapshot.memory["sound"]:
            return False
        # asked every time: parameters may have been added or removed since
        return not self._run_state.misfit(snapshot.state, own_only=True)

    def meant_nonfinite(self, names: set[str]) -> set[str]:
        """Tensors that may be non-finite: sentinels, and a bad start that the policy accepts."""
        if not names:
            return set()
        accepted = self._context.on_purpose()
        return {name for name in names if not accepted.isdisjoint(_full_names(name))}

    # --- what the present weights are worth

    def divergence(self) -> str:
        """Why the present state counts as diverged; empty where it does not. Reads the weights."""
        return self._judged(root_mean_square(self._context.parameters))

    def exploded(self, snapshot: Snapshot) -> bool:
        """Were its weights exploded when it was taken, whatever its loss said then?"""
        history = self._context.history
        return bool(history.divergence(Weights(growth=self._growth(snapshot.memory["size"]))))

    def _judged(self, size: Tensor | None) -> str:
        """Judge the run by its loss and by weights of this size, and tell where that has changed.

        Where neither is suspicious nothing else is read.
        """
        context = self._context
        history = context.history
        began = history.diverged_at
        if context.config.probes.anomalies == "off":
            return ""
        if began is not None and self._diverged is not None and self._diverged[0] == began:
            return history.told(self._diverged[1])
        weights = Weights(growth=self._growth(size))
        if began is not None or weights.grown(EXPLODED):
            update = None
            if history.rates:
                update = update_ratio(context.optimizer, history.rates[-1])
            moved = self._moved_since(context.step - SUDDEN)
            weights = weights._replace(update=update, moved=moved)
        shown = history.divergence(weights)
        why = history.told(shown) if shown else ""
        if why and self._diverged is None:
            after = "from here on its states are sealed as diverged, and last-good does not move"
            context.outputs.note("diverged", f"the run has diverged: {why}; {after}", diverged=why)
        elif not why and self._diverged is not None:
            context.outputs.note("diverged", "the run recovered from its divergence", diverged="")
        self._diverged = (began, shown) if shown else None
        return why

    def _growth(self, size: Tensor | None) -> float | None:
        """Size of the weights over that before the first step; None where it is not known."""
        first = self._context.memory.first_size
        if size is None or first is None:
            return None
        growth = float(size) / max(float(first), LEAST_SIZE)
        # squares of huge weights overflow; weights that are not finite are no matter of size
        if math.isfinite(growth) or all(map(is_finite, self._context.parameters)):
            return growth
        return None

    def moved_since_good(self) -> float | None:
        """Distance of the weights from the newest good snapshot, over their norm; None if none."""
        return self._moved_since(0)

    def _moved_since(self, oldest: int) -> float | None:
        for snapshot in self._ring.good():
            if snapshot.step >= oldest and self.sound(snapshot):
                return self._run_state.distance(snapshot.state)
        return None


def _full_names(saved: str) -> set[str]:
    """What `Context.accepted` may call a tensor of a saved state."""
    if saved.startswith("rank/"):
        saved = saved.split("/", 2)[2]
    kind, _, name = saved.partition("/")
    if kind.startswith("extra:"):
        return {saved}
    if kind == "model" or kind.startswith("module:"):
        path = dotted(kind.partition(":")[2], name)
        return {f"param:{path}", f"buffer:{path}"}
    if kind == "optimizer_inner":
        name = name.partition("/")[2]
    # the slot may hold a list, whose tensors are numbered; further modules are cut off by a slash
    parts = name.split("/")
    ends = range(1, len(parts))
    return {f"opt:{'.'.join(parts[:end])}/{parts[end]}" for end in ends}


def wait_for_copies() -> None:
    """Copies from an accelerator are asynchronous and may still be on their way."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# --- Take snapshots between steps: the whole state of a run, copied into memory.


class Duty(Protocol):
    """Something that is done between two steps when its time has come."""

    def due(self) -> bool: ...
    def do(self) -> None: ...


REPLAY_MEMORY = 2**28
"""Bytes of batches kept so that steps since a snapshot can be run again exactly."""


class SnapshotKeeper:
    """The snapshots of one guard, and the steps since, which can be run again."""

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.perf_counter) -> None:
        config = context.config
        self._context = context
        # states beside model and optimizer, where the run may have any
        found: dict[str, AttachedState] = {}
        if context.agreement.mode == "spread":
            found["communication hooks"] = context.memory.attached
        self.run_state = RunState(
            context.roots,
            context.optimizer,
            scheduler=context.scheduler,
            scaler=context.scaler,
            extra={**context.extra, **found},
            rank=context.agreement.rank,
            ownership=context.ownership,
        )
        self.ring = Ring(
            config.snapshots.count,
            config.snapshots.memory,
            among_ranks=context.agreement.mode != "alone",
        )
        self.kept = KeptSteps(REPLAY_MEMORY)
        self.probation = Probation(context, self.run_state, self.ring)
        self.cadence = Cadence(config.snapshots.every, clock)
        self.duties: list[Duty] = []
        """What else is done between two steps."""
        self.wanted = "rewind" in config.policy.actions
        """A policy that never rewinds needs no snapshots."""
        self.off = "" if config.snapshots.count else "Snapshots.count is 0"
        """Why none are taken, in words; empty while they are."""
        self._seen = -1
        """The last step before which everything due was done."""
        self._paused = False
        self._midstep = False
        """A forward pass has run since the buffers were remembered."""

    def due(self) -> bool:
        """Is there something to do between these two steps? Then the last one is ended first."""
        if self._paused:
            return False
        if self._snapshot_due():
            return True
        for duty in self.duties:  # noqa: SIM110 - asked in every step
            if duty.due():
                return True
        return False

    def between_steps(self) -> None:
        """Do what is due: one step is over and the next has not begun."""
        if self._paused:
            return
        if self._snapshot_due():
            self.take()
        self._seen = self._context.step
        for duty in self.duties:
            if duty.due():
                duty.do()

    def before_update(self) -> None:
        """Do what is due at the last moment before an update, where the loop showed none earlier.

        Weights, optimizer and schedule are still those from between the steps; the buffers are
        taken as remembered.
        """
        self._midstep = True
        try:
            self.between_steps()
        finally:
            self._midstep = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take none while steps are run again: the loop and its data are already further on."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._seen = self._context.step

    def _snapshot_due(self) -> bool:
        step = self._context.step
        if step == self._seen or step in self.cadence.quiet or self.off or not self.wanted:
            return False
        # after a bad step there is nothing new to keep, and something good to lose
        return self.cadence.due(step) and self.probation.incident_at != step - 1

    def at(self, step: int) -> Snapshot | None:
        """The snapshot of this very step on the present timeline."""
        for snapshot in self.ring.snapshots:
            if snapshot.step == step:
                return snapshot
        return None

    def take(self, *, must: bool = False) -> Snapshot | None:
        """Copy the present state; None without room. `must` gives up a young one for it."""
        if self.off:
            return None
        context = self._context
        began = self.cadence.clock()
        try:
            state = self.present()
            why = self.ring.too_small(state)
        except Exception as fault:
            # the user's objects, or a state that cannot be kept: training continues without
            why = str(fault) or type(fault).__name__
        if why:
            self.turn_off(why)
            context.outputs.note("snapshots", f"no snapshots: {why.removesuffix('.')}")
            return None
        snapshot = self.ring.take(context.step, state, must=must)
        if snapshot is None:
            return None
        snapshot.memory = {
            "anchor": context.memory.anchor,
            "level": context.history.level if context.history.losses else None,
            "size": root_mean_square(context.parameters),
            "diverged": self.probation.divergence() if context.history.diverged_at else "",
            "timeline": context.budget.rewinds,
        }
        self.cadence.took(context.step, self.cadence.clock() - began)
        oldest = self.ring.good() or self.ring.snapshots
        self.kept.forget_before(min(snapshot.step for snapshot in oldest))
        return snapshot

    def present(self) -> SavedState:
        """The state as it is now, the guard's own included; its tensors are the live ones."""
        context = self._context
        state = self.run_state.gather()
        if self._midstep:
            state.tensors = context.buffers.as_remembered(state.tensors)
        own = {
            "step": context.step,
            "history": history_facts(context.history),
            "budget": asdict(context.budget),
            "loss_scale": context.scales.static,
        }
        state.facts["guard"] = tree_to_json(own, {}, "guard")
        if context.data.feed is not None:
            rank = context.agreement.rank
            position = tree_to_json(context.data.feed.position(), state.tensors, f"loader/{rank}")
            state.facts["loader"] = {str(rank): position}
        return state

    def turn_off(self, why: str) -> None:
        """Take no snapshots from here on. Silent: the caller tells the user why."""
        self.off = why
        self.ring.clear()

    def keep(self, step: Step, loss: float | None, lr: tuple[float, ...] = ()) -> None:
        """Keep a healthy step, where a rewind may have to run it again."""
        if self.wanted:
            self.kept.keep(step, loss, lr)

    def restarted(self) -> None:
        """The state has been replaced, by a rewind or a checkpoint: count from here."""
        self._context.remember()
        self.cadence.rewound(self._context.step)
        self._seen = self._context.step


# --- Which part of every tensor of a checkpoint this rank reads, whatever mesh it was written on.


OF_OTHERS = ("rng/", "rank/")
"""Tensors that each rank has its own of; places in the data are read for all ranks."""
SLOTS = "optimizer/"


def wanted_parts(context: Context, run_state: RunState) -> Select:
    """The parts that the live tensors of this rank are, those of a new optimizer included."""
    parts = run_state.gather().parts
    of_parameters = run_state.parameter_parts()
    own = [f"{kind}{context.agreement.rank}/" for kind in OF_OTHERS]

    def select(name: str, shape: tuple[int, ...]) -> TensorPart | None:
        if name.startswith(OF_OTHERS) and not name.startswith(tuple(own)):
            return None
        part = parts.get(name)
        if part is None and name.startswith(SLOTS):
            # the optimizer has not made it yet: it is divided as its parameter is
            # The parameter of `optimizer/PARAMETER/SLOT`; both may have slashes in their names.
            parameter = name.removeprefix(SLOTS)
            while parameter and parameter not in of_parameters:
                parameter = parameter.rpartition("/")[0]
            part = of_parameters.get(parameter)
        if part is not None and part.whole == shape:
            return part
        return whole_part(shape)

    return select
