"""Plan a rewind: which states every rank can go back to, and which of them has not been tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from stepguard.engine.context import Context
from stepguard.engine.recover.snapshots import Snapshots
from stepguard.policy.decide import NOTHING_GOOD
from stepguard.policy.rewind_choice import RewindPlan, RewindTarget, next_rewind
from stepguard.state.run_state import SavedState
from stepguard.state.snapshot import Snapshot

Offer = list[Any]
"""Step, kind and timeline of a state: what one rank tells the others of a rewind target."""


class StateArchive(Protocol):
    """States on disk."""

    def steps(self) -> list[int]: ...
    def read(self, step: int) -> SavedState | None: ...


class RewindPlanner:
    """Chooses with the other ranks where to go back to, and remembers what has been tried."""

    def __init__(self, context: Context, snapshots: Snapshots) -> None:
        self._context = context
        self._snapshots = snapshots
        self._ring = snapshots.ring
        self._whole = snapshots.run_state
        self.archive: StateArchive | None = None
        """Checkpoints, for going further back than memory does."""
        self._tried: list[RewindPlan] = []
        self._repeated: dict[RewindPlan, int] = {}
        """Of those, the exact repetitions, and the step that had failed."""
        self._chosen: RewindPlan | None = None
        self._fetched: Snapshot | None = None
        """What the last plan has read from disk."""

    def plan(self, *, transient: bool, visible: bool) -> tuple[RewindPlan | None, str]:
        """Choose the next rewind, the same on every rank; or say why there is none.

        `visible`: the damage is NaN or Inf. Any snapshot without is from before, so the newest of
        them loses least. Damage that cannot be seen asks for one that has proved good, else for one
        on probation from a good level.
        """
        self._forget_what_worked()
        told = self._context.agreement.together(
            partial(self._offer, visible), "the choice of a rewind"
        )
        tried: list[RewindTarget] = []
        for standing in ("good", "young"):
            targets = _offered_by_all(facts[standing] for facts in told)
            exact = transient and _repeatable_by_all(targets, told)
            self._chosen = self._choose(targets, exact)
            if self._chosen is not None:
                return self._chosen, ""
            tried += targets
        if not tried:
            return None, NOTHING_GOOD
        steps = ", ".join(str(target.step) for target in tried)
        return None, f"every rewind has been tried at step {steps}"

    def take(self) -> tuple[RewindPlan, Snapshot]:
        """Hand out the last plan, which counts as tried from now on, and the state it goes to."""
        plan = self._chosen
        fetched = self._fetched
        assert plan is not None, "a rewind is decided with a plan only"
        self._chosen = None
        self._fetched = None
        self._tried.append(plan)
        if plan.data == "repeat":
            self._repeated[plan] = self._context.step
        if plan.target.kind == "checkpoint" and fetched is not None:
            return plan, fetched
        for snapshot in self._ring.snapshots:
            if _offer_of(snapshot) == [plan.target.step, "snapshot", plan.target.timeline]:
                return plan, snapshot
        raise LookupError(f"the snapshot of step {plan.target.step} is gone")

    def _forget_what_worked(self) -> None:
        """A repetition that led well past the step that failed may serve for another fault."""
        step = self._context.step
        for plan, failed in list(self._repeated.items()):
            if step - failed > self._context.config.probation:
                del self._repeated[plan]
                self._tried.remove(plan)

    def forget(self) -> None:
        """Forget what was tried: another run begins."""
        self._tried.clear()
        self._repeated.clear()

    def _choose(self, targets: list[RewindTarget], exact: bool) -> RewindPlan | None:
        """The next rewind whose target can really be had: a checkpoint is read before it counts."""
        policy = self._context.config.policy
        rewinds = self._context.budget.rewinds
        while True:
            plan = next_rewind(targets, self._tried, policy, repeatable=exact, rewinds=rewinds)
            if plan is None or plan.target.kind == "snapshot":
                return plan
            told = self._context.agreement.together(
                partial(self._fetch, plan.target.step), "reading a checkpoint"
            )
            if all(facts["there"] for facts in told):
                return plan
            self._tried.append(plan)

    def _fetch(self, step: int) -> dict[str, Any]:
        self._fetched = None
        state = self.archive.read(step) if self.archive is not None else None
        if state is None or self._whole.misfit(state, own_only=True):
            return {"there": False}
        memory = {"anchor": None, "diverged": "", "size": None, "level": None}
        self._fetched = Snapshot(step, 0, state, memory)
        return {"there": True}

    # --- what this rank can go back to

    def _offer(self, visible: bool) -> dict[str, Any]:
        good = self._ring.snapshots
        if not visible:
            good = [snapshot for snapshot in self._ring.good() if self._level_was_good(snapshot)]
        young = [s for s in self._ring.snapshots if s not in good and self._level_was_good(s)]
        offered = self._sound_ones(good)
        offered += self._checkpoints(beside={step for step, *_ in offered})
        on_probation = self._sound_ones(young)
        steps = [step for step, *_ in (*offered, *on_probation)]
        return {"good": offered, "young": on_probation, "repeatable": self._repeatable(steps)}

    def _sound_ones(self, snapshots: Iterable[Snapshot]) -> list[Offer]:
        probation = self._snapshots.probation
        return [_offer_of(snapshot) for snapshot in snapshots if probation.sound(snapshot)]

    def _checkpoints(self, beside: set[int]) -> list[Offer]:
        if self.archive is None:
            return []
        return [[step, "checkpoint", 0] for step in self.archive.steps() if step not in beside]

    def _repeatable(self, steps: Iterable[int]) -> list[int]:
        """Those from which on every step can be run again as it was."""
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


def _offer_of(snapshot: Snapshot) -> Offer:
    return [snapshot.step, "snapshot", snapshot.memory["timeline"]]


def _offered_by_all(offers: Iterable[list[Offer]]) -> list[RewindTarget]:
    """The states that every rank has, newest first."""
    first, *others = [set(map(tuple, offered)) for offered in offers]
    newest_first = sorted(first.intersection(*others), reverse=True)
    return [RewindTarget(step=s, kind=kind, timeline=t) for s, kind, t in newest_first]


def _repeatable_by_all(targets: Sequence[RewindTarget], told: Sequence[dict[str, Any]]) -> bool:
    return bool(targets) and all(targets[0].step in facts["repeatable"] for facts in told)
