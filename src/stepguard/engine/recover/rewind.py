"""Go back to a snapshot or checkpoint of this run, the same one on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from stepguard.detect.history import LR_JUMP, history_from
from stepguard.engine.context import Context
from stepguard.engine.recover.kept_steps import KeptStep
from stepguard.engine.recover.past_attempts import PastAttempts
from stepguard.engine.recover.peer_healing import PeerHealing
from stepguard.engine.recover.probation import wait_for_copies
from stepguard.engine.recover.rewind_planner import RewindPlanner
from stepguard.engine.recover.snapshots import Snapshots
from stepguard.policy.decide import NOTHING_GOOD
from stepguard.policy.rewind_choice import RewindData, RewindPlan
from stepguard.records import Decision, Incident
from stepguard.sentinel.rank_agreement import RankFault
from stepguard.state.snapshot import Snapshot
from stepguard.state.step import Step
from stepguard.state.tree_json import tree_from_json


class Rewinder:
    """Plans and makes the rewinds of one guard. Owns its snapshots."""

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._context = context
        self.snapshots = Snapshots(context, clock=clock)
        self.probation = self.snapshots.probation
        self.planner = RewindPlanner(context, self.snapshots)
        self.start: Snapshot | None = None
        """Where the last rewind went."""
        self.left: list[KeptStep] = []
        """The steps that the last rewind took back."""
        self.healing = PeerHealing(context)
        self.retried = -1
        """The last step that was run a second time."""
        self.past = PastAttempts()
        """What earlier attempts of this run came to."""
        self.after_commit: list[Callable[[int], None]] = []
        self.after_rewind: list[Callable[[], None]] = []
        """Called when the state was replaced: for what holds numbers of the state that is gone."""
        self.before_stop: list[Callable[[Incident], Path | None]] = []
        """Called when the policy stops the run: each may save a state and say where."""

    def plan(self, *, transient: bool, visible: bool) -> tuple[RewindPlan | None, str]:
        """Choose where to go back to, the same on every rank; or say why that is not possible."""
        if not self.snapshots.wanted:
            return None, NOTHING_GOOD
        plan, why_not = self.planner.plan(transient=transient, visible=visible)
        if self.snapshots.off:
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
        since = f"the steps since are {_described(plan.data)}"
        summary = f"rewound from step {came_from} to {plan.target.step}; {since}"
        context.outputs.line("rewind", {**facts, "kind": "rewind", "summary": summary})

    def heal(self, decision: Decision, step: int) -> Decision:
        """Give damaged ranks the state of healthy ones, as planned; where that fails, stop."""
        try:
            given = self.healing.heal(step)
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
        rates = context.history
        context.history = history_from(own["history"])
        if self.snapshots.run_state.before_adoption(snapshot.state):
            # the rates of that time were those of another optimizer
            context.history.first_lr, context.history.top_lr = rates.first_lr, rates.top_lr
            context.history.configured_lr = rates.configured_lr
        context.anchor = snapshot.memory.get("anchor")
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
        self._context.anchor = None
        self._restarted()

    def _restarted(self) -> None:
        self._context.missed = ""
        self.snapshots.restarted()
        for tell in self.after_rewind:
            tell()

    def committed(self, done: int) -> None:
        """So many steps are done: end probations that are over, and tell who waits for it."""
        self.probation.commit(done)
        for tell in self.after_commit:
            tell(done)

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
        newest_of_all = self._newest_of_all([snapshot.step for snapshot in sound])
        for snapshot in reversed(sound):
            if newest_of_all is None or snapshot.step == newest_of_all:
                self.put_back(snapshot)
                return snapshot.step
        return None

    def _newest_of_all(self, steps: list[int]) -> int | None:
        """The newest of these steps that every rank has; None where that cannot be known."""
        try:
            told = self._context.agreement.together(
                lambda: {"steps": steps}, "the state at the stop", whatever_failed=True
            )
        except RankFault:
            return None
        shared = set(steps)
        for facts in told:
            shared &= set(facts["steps"])
        return max(shared, default=-1)


def _described(data: RewindData) -> str:
    match data:
        case "repeat":
            return "run again as they were"
        case "skip":
            return "left behind"
        case "reorder":
            return "run again in another order"
        case unknown:
            assert_never(unknown)
