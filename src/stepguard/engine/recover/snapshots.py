"""Take snapshots between steps: the whole state of a run, copied into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Protocol

from stepguard.detect.history import history_facts
from stepguard.engine.context import Context
from stepguard.engine.recover.kept_steps import KeptSteps
from stepguard.engine.recover.probation import Probation
from stepguard.engine.recover.rank_cadence import cadence_of
from stepguard.sentinel.stored_tensors import root_mean_square
from stepguard.state.attached_state import AttachedState, averager
from stepguard.state.run_state import RunState, SavedState
from stepguard.state.snapshot import Ring, Snapshot
from stepguard.state.step import Step
from stepguard.state.tree_json import tree_to_json


class Duty(Protocol):
    """Something that is done between two steps when its time has come."""

    def due(self) -> bool: ...
    def do(self) -> None: ...


class Snapshots:
    """The snapshots of one guard, and the steps since, which can be run again."""

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.perf_counter) -> None:
        config = context.config
        self._context = context
        self.run_state = RunState(
            context.roots,
            context.optimizer,
            scheduler=context.scheduler,
            scaler=context.scaler,
            extra={**context.extra, **_attached(context)},
            rank=context.agreement.rank,
            ownership=context.ownership,
        )
        self.ring = Ring(
            config.snapshots, config.snapshot_memory, among_ranks=context.agreement.mode != "alone"
        )
        self.kept = KeptSteps(config.replay_memory)
        self.probation = Probation(context, self.run_state, self.ring)
        self.cadence = cadence_of(context.agreement, config.snapshot_every, clock)
        self.duties: list[Duty] = []
        """What else is done between two steps."""
        self.off = "" if config.snapshots else "GuardConfig.snapshots is 0"
        """Why none are taken, in words; empty while they are."""
        self._seen = -1
        """The last step before which everything due was done."""
        self._paused = False
        self._midstep = False
        """A forward pass has run since the buffers were remembered."""

    @property
    def wanted(self) -> bool:
        """A policy that never rewinds needs no snapshots."""
        return "rewind" in self._context.config.policy.actions

    def due(self) -> bool:
        """Is there something to do between these two steps? Then the last one is ended first."""
        if self._paused:
            return False
        return self._snapshot_due() or any(duty.due() for duty in self.duties)

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
        if step == self._seen or self.off or not self.wanted:
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
            "anchor": context.anchor,
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
            "loss_scale": context.loss_scale,
        }
        state.facts["guard"] = tree_to_json(own, {}, "guard")
        if context.feed is not None:
            rank = context.agreement.rank
            position = tree_to_json(context.feed.position(), state.tensors, f"loader/{rank}")
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


def _attached(context: Context) -> dict[str, AttachedState]:
    """States beside model and optimizer, where the run may have any."""
    found: dict[str, AttachedState] = {}
    if context.agreement.mode == "spread":
        found["communication hooks"] = context.attached
    outer = context.outer
    if outer is not None and averager(outer):
        found["averager"] = AttachedState(partial(averager, outer))
    return found
