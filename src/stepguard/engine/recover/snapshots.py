"""Snapshots of a run, which of them are good, and going back to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stepguard.detect.history import LR_JUMP, SUDDEN, history_facts, history_from
from stepguard.engine.context import Context
from stepguard.engine.incident.ruined_run import Ruin
from stepguard.engine.recover.kept_steps import Kept, Window
from stepguard.engine.recover.past_attempts import Past
from stepguard.engine.recover.rewind_planner import Planning
from stepguard.policy.decide import NOTHING_GOOD
from stepguard.policy.rewind_choice import Remedy
from stepguard.records import Incident
from stepguard.state.replay import reevaluate
from stepguard.state.run_state import RunState, SavedState
from stepguard.state.snapshot import Cadence, Ring, Snapshot
from stepguard.state.step import Step
from stepguard.state.tree_json import put_together, take_apart
from stepguard.tensors.values import is_finite


class Duty(Protocol):
    """Something that is done between two steps when its time has come."""

    def due(self) -> bool: ...
    def do(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Compared:
    """Losses, lower is better; each was evaluated."""

    step: int
    """Of the snapshot."""
    then: float
    """The earlier step when it ran."""
    again: float
    """The earlier step on the same weights, now."""
    now: float
    """The earlier step on the present weights."""
    this_then: float
    """The present step on the weights of the snapshot."""


class Recovery:
    """Owns the ring of one guard."""

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.perf_counter) -> None:
        config = context.config
        self._context = context
        self.whole = RunState(
            context.roots,
            context.optimizer,
            scheduler=context.scheduler,
            scaler=context.scaler,
            extra=context.extra,
            rank=context.agreement.rank,
            ownership=context.ownership,
        )
        self.ring = Ring(config.snapshots, config.snapshot_memory)
        self.window = Window(config.replay_memory)
        self._cadence = Cadence(config.snapshot_every, clock)
        self._off = "" if config.snapshots else "GuardConfig.snapshots is 0"
        self._seen = -1
        self._replaying = False
        self._midstep = False
        """A forward pass has run since the buffers were remembered."""
        self.planning = Planning(context, self.whole, self.ring, self.window, self._sound)
        self._ruin = Ruin(context, self._moved_lately)
        self.start: Snapshot | None = None
        """Where the last rewind went."""
        self.left: list[Kept] = []
        """The steps that the last rewind took back."""
        self.hurt_at: int | None = None
        """The last step that found the weights hurt, where nothing was done about it."""
        self.incident_at = -1
        self.duties: list[Duty] = []
        """What else is done between two steps."""
        self.retried = -1
        """The last step that was run a second time."""
        self.after_commit: list[Callable[[int], None]] = []
        self.before_stop: list[Callable[[Incident], Path | None]] = []
        self.past = Past()
        self.after_rewind: list[Callable[[], None]] = []
        """Whoever holds numbers of the state that is gone."""

    @property
    def wanted(self) -> bool:
        """A policy that never rewinds needs no snapshots."""
        return "rewind" in self._context.config.policy.actions

    # --- taking
    # ------------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Is there something to do between these two steps? Then the last one must be closed first."""
        return not self._replaying and (
            self._snapshot_due() or any(duty.due() for duty in self.duties)
        )

    def between(self) -> None:
        """One step is wholly over and the next has not begun."""
        if self._replaying:
            return
        if self._snapshot_due():
            self.take()
        self._seen = self._context.step
        for duty in self.duties:
            if duty.due():
                duty.do()

    def before_update(self) -> None:
        """The last moment before a step's update, for a loop that showed none before its forward.

        Weights, optimizer and schedule are still those from between the steps; the buffers are
        taken as remembered.
        """
        self._midstep = True
        try:
            self.between()
        finally:
            self._midstep = False

    def _snapshot_due(self) -> bool:
        step = self._context.step
        if step == self._seen or self._off or not self.wanted:
            return False
        # after a bad step there is nothing new to keep, and something good to lose
        return self._cadence.due(step) and self.incident_at != step - 1

    def at(self, step: int) -> Snapshot | None:
        """The snapshot of this very step on the present timeline."""
        return next((s for s in self.ring.snapshots if s.step == step), None)

    def take(self, *, must: bool = False) -> Snapshot | None:
        """A snapshot of the present state; `must` gives up a young one for it. None where there is
        no room.
        """
        if self._off:
            return None
        context, began = self._context, self._cadence.clock()
        try:
            state = self.present()
            why = self.ring.too_small(state)
        # of the user's objects, or a state that cannot be kept: training goes on without
        except Exception as fault:
            why = str(fault) or type(fault).__name__
        if why:
            self._turn_off(why)
            return None
        snapshot = self.ring.take(context.step, state, must=must)
        if snapshot is None:
            return None
        snapshot.memory = {
            "anchor": context.anchor,
            "level": context.history.level if context.history.losses else None,
            "ruined": self.ruined,
            "timeline": context.budget.rewinds,
        }
        self._cadence.took(context.step, self._cadence.clock() - began)
        self.window.forget_before(min(s.step for s in (self.ring.good() or self.ring.snapshots)))
        return snapshot

    def present(self) -> SavedState:
        """The state as it is now, the guard's own included; its tensors are the live ones."""
        context, state = self._context, self.whole.gather()
        if self._midstep:
            state.tensors = context.buffers.as_remembered(state.tensors)
        own = {
            "step": context.step,
            "history": history_facts(context.history),
            "budget": asdict(context.budget),
            "loss_scale": context.loss_scale,
        }
        state.facts["guard"] = take_apart(own, {}, "guard")
        if context.feed is not None:
            rank = context.agreement.rank
            position = take_apart(context.feed.position(), state.tensors, f"loader/{rank}")
            state.facts["loader"] = {str(rank): position}
        return state

    def _turn_off(self, why: str) -> None:
        self._off = why
        self.ring.clear()
        self.say("snapshots", f"no snapshots: {why.removesuffix('.')}")

    def do_without(self, why: str) -> None:
        """No snapshots from here on, without a word: whoever decides it says so."""
        self._off = why
        self.ring.clear()

    def say(self, kind: str, summary: str, **facts: Any) -> None:
        """One line in journal, log and terminal."""
        context = self._context
        context.note("note", {"step": context.step, "kind": kind, "summary": summary, **facts})
        if context.human is not None:
            context.human.note(summary, context.step, kind)
        context.terminal.line(f"step {context.step}: {summary}")

    def keep(self, step: Step, loss: float | None) -> None:
        """Hold on to a step that went as it should, where it may have to be run again."""
        if self.wanted:
            self.window.keep(step, loss)

    # --- judging
    # -----------------------------------------------------------------------------------------------

    def committed(self, done: int) -> None:
        """So many steps are done: has a snapshot come through its probation?"""
        for snapshot in self.ring.snapshots:
            if (
                snapshot.standing == "young"
                and done - snapshot.watched_from >= self._context.config.probation
            ):
                snapshot.standing = "bad" if self.ruined or snapshot.memory["ruined"] else "good"
                self.ring.keep_best()
        for tell in self.after_commit:
            tell(done)

    def incident(self, step: int, *, hurt: bool) -> None:
        """Probation begins anew; where the weights themselves are hurt nobody knows since when."""
        self.incident_at = step
        self.hurt_at = step if hurt else self.hurt_at
        for snapshot in self.ring.snapshots:
            if snapshot.standing == "young":
                snapshot.standing = "bad" if hurt else "young"
                snapshot.memory["hurt"] = hurt
                snapshot.watched_from = step + 1

    @property
    def ruined(self) -> bool:
        """Is most of what this run had learned lost, by its loss and by its weights?"""
        return self._ruin.confirmed()

    def _moved_lately(self) -> float | None:
        """How far the weights are from a good snapshot of the last steps; None where there is none."""
        since = self._context.step - SUDDEN
        recent = next((s for s in self.ring.good() if s.step >= since and self._sound(s)), None)
        return self.whole.distance(recent.state) if recent is not None else None

    def worth_keeping(self, snapshot: Snapshot) -> bool:
        """Can it be gone on from? Finite, and no incident found the weights hurt since."""
        return snapshot.standing == "good" or (
            self._sound(snapshot) and not snapshot.memory.get("hurt")
        )

    def moved_since_good(self) -> float | None:
        """How far the weights are from the newest good snapshot, over their norm; None where there
        is none.
        """
        good = next((s for s in self.ring.good() if self._sound(s)), None)
        return self.whole.distance(good.state) if good is not None else None

    def lost_before(self, step: int) -> bool:
        """Did an earlier attempt of this run leave this step out?"""
        return step in self.past.lost_steps

    def leave(self, incident: Incident) -> Path | None:
        """The policy stops the run: whoever keeps states on disk saves the newest good one, and
        says where.
        """
        places = [tell(incident) for tell in self.before_stop]
        return next((place for place in places if place is not None), None)

    def leave_good_in_memory(self) -> int | None:
        """The run stops on damaged state: the newest state without the damage is put back, and its
        step told.
        """
        sound = [snapshot for snapshot in reversed(self.ring.snapshots) if self._sound(snapshot)]
        if not sound or self._context.agreement.size > 1:
            return None
        self.put_back(sound[0])
        return sound[0].step

    def _sound(self, snapshot: Snapshot) -> bool:
        """Finite, but for what was never meant to be; looked at once, when it is needed."""
        if "sound" not in snapshot.memory:
            _wait()
            bad = {name for name, tensor in snapshot.state.tensors.items() if not is_finite(tensor)}
            snapshot.memory["sound"] = bad <= self.meant_nonfinite(bad)
        # asked anew each time: parameters may have been added or taken away since
        return bool(snapshot.memory["sound"]) and not self.whole.misfit(
            snapshot.state, own_only=True
        )

    def meant_nonfinite(self, names: set[str]) -> set[str]:
        """Those of the tensors that have been accepted as they are: sentinels, and what `bad_start`
        let pass.
        """
        labels = (
            {label.partition(":")[2] for label in self._context.on_purpose()} if names else set()
        )
        return {name for name in names if any(_ends_in(name, label) for label in labels)}

    def loss_function_changed(self) -> bool:
        """Does no earlier step give what it gave, on the weights it had? False where none can be
        asked.

        One snapshot that does is enough: another one may have been taken after the damage.
        """
        asked = False
        for snapshot in self.ring.snapshots:
            kept = self.window.at(snapshot.step) if self._sound(snapshot) else None
            if kept is None or kept.loss is None:
                continue
            with self.whole.parameters_from(snapshot.state):
                now = reevaluate(kept.step)
            if kept.same(now):
                return False
            asked = True
        return asked

    def compared_with_best(self, step: Step) -> Compared | None:
        """An earlier step and this one on the best weights this run had, and that step on the
        present ones.
        """
        sign = -1.0 if self._context.climbs else 1.0
        levelled = [
            s for s in self.ring.good() if s.memory["level"] is not None and not s.memory["ruined"]
        ]
        for snapshot in sorted(levelled, key=lambda s: float(s.memory["level"])):
            kept = self.window.at(snapshot.step) if snapshot.step < step.index else None
            if kept is None or kept.loss is None or not self._sound(snapshot):
                continue
            with self.whole.parameters_from(snapshot.state):
                own_now = sign * reevaluate(kept.step)
                this_then = sign * reevaluate(step)
            return Compared(
                snapshot.step, sign * kept.loss, own_now, sign * reevaluate(kept.step), this_then
            )
        return None

    # --- going back
    # --------------------------------------------------------------------------------------------

    def plan(self, *, transient: bool, visible: bool) -> tuple[Remedy | None, str]:
        """Where to go back to, the same on every rank; or why that is not possible."""
        if not self.wanted:
            return None, NOTHING_GOOD
        remedy, why_not = self.planning.plan(transient=transient, visible=visible)
        return remedy, f"{why_not} ({self._off})" if self._off else why_not

    def rewind(self) -> None:
        """Go where the last plan said. The random numbers go on: else a step would fail again by
        what it draws.
        """
        context = self._context
        came_from = context.step
        remedy, self.start = self.planning.take()
        self.put_back(self.start)
        facts = {"step": came_from, "to": context.step, "data": remedy.data, "lr": context.lr}
        context.note("rewind", {**facts, "kind": "rewind", "summary": _story(came_from, remedy)})

    def put_back(self, snapshot: Snapshot) -> None:
        _wait()
        for trouble in self.whole.put_back(snapshot.state, own_only=True):
            self.say("rewind", trouble)
        context = self._context
        context.anchor = snapshot.memory.get("anchor")
        own = put_together(snapshot.state.facts["guard"], {})
        context.step, context.history = own["step"], history_from(own["history"])
        self.hurt_at, self.incident_at = None, min(self.incident_at, context.step - 1)
        self._keep_rates_sane()
        self.left = self.window.rewound(snapshot.step)
        self.ring.drop(lambda s: s.step > snapshot.step)
        if (
            snapshot.standing == "bad"
        ):  # the incident took every young one for bad; this one is put to the test
            snapshot.standing, snapshot.watched_from = "young", snapshot.step
        self._settle_in()

    def _settle_in(self) -> None:
        """The state has been replaced."""
        context = self._context
        context.buffers.remember()
        self._cadence.rewound(context.step)
        self._seen = context.step
        for tell in self.after_rewind:
            tell()

    def _keep_rates_sane(self) -> None:
        """A rate far above everything configured does not survive a rewind, whoever put it there."""
        self._context.expect_declared_rates(self._context.lr)
        ceilings = self._context.lr_ceiling
        for group, ceiling in zip(self._context.optimizer.param_groups, ceilings, strict=True):
            if group.get("lr") is not None and float(group["lr"]) > LR_JUMP * ceiling:
                group["lr"] = (
                    torch.full_like(group["lr"], ceiling)
                    if isinstance(group["lr"], Tensor)
                    else ceiling
                )

    def forget(self) -> None:
        """Another state has been loaded: everything in memory belongs to a run that is gone."""
        context = self._context
        self.ring.drop(lambda _: True)
        self.window.broken(context.step - 1)
        self.hurt_at, self.incident_at, self.retried, context.anchor = None, -1, -1, None
        self.planning.forget()
        self._settle_in()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Steps are run again: the loop and its data are already further on, so no snapshot is
        taken.
        """
        self._replaying = True
        try:
            yield
        finally:
            self._replaying, self._seen = False, self._context.step


def _story(came_from: int, remedy: Remedy) -> str:
    done = {
        "repeat": "run again as they were",
        "skip": "left behind",
        "reorder": "run again in another order",
    }
    return (
        f"rewound from step {came_from} to {remedy.place.step}; the steps since are "
        f"{done[remedy.data]}"
    )


def _ends_in(name: str, label: str) -> bool:
    return name.endswith((f"/{label}", f".{label}"))


def _wait() -> None:
    """Copies from an accelerator may still be on their way."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
