"""Where a rewind would go: the places that every rank can go back to, and the next remedy that has
not been tried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from stepguard.engine.context import Context
from stepguard.engine.recover.kept_steps import Window
from stepguard.policy.decide import NOTHING_GOOD
from stepguard.policy.rewind_choice import Place, Remedy, choose
from stepguard.state.run_state import RunState, SavedState
from stepguard.state.snapshot import Ring, Snapshot


class Archive(Protocol):
    """States on disk."""

    def steps(self) -> list[int]: ...
    def read(self, step: int) -> SavedState | None: ...


class Planning:
    """Chooses with the other ranks, and remembers what has been tried."""

    def __init__(
        self,
        context: Context,
        whole: RunState,
        ring: Ring,
        window: Window,
        sound: Callable[[Snapshot], bool],
    ) -> None:
        self._context, self._whole, self._ring, self._window = context, whole, ring, window
        self._sound = sound
        self.archive: Archive | None = None
        """Checkpoints, for going further back than memory does."""
        self._tried: list[Remedy] = []
        self._chosen: Remedy | None = None
        self._fetched: Snapshot | None = None
        """What the last plan has read from disk."""

    def plan(self, *, transient: bool, visible: bool) -> tuple[Remedy | None, str]:
        """The next remedy, the same on every rank; or why there is none.

        `visible`: the damage is NaN or Inf. Any snapshot without is from before, so the newest of
        them loses least. Damage that cannot be seen asks for one that has proved good, else for one
        on probation from a good level.
        """
        everybody = self._context.agreement.together(partial(self._offer, visible))
        tried: list[Place] = []
        for standing in ("good", "young"):
            common = set.intersection(
                *({tuple(place) for place in told[standing]} for told in everybody)
            )
            places = [Place(step=s, kind=k, timeline=t) for s, k, t in sorted(common, reverse=True)]
            exact = (
                transient
                and bool(places)
                and all(places[0].step in told["repeatable"] for told in everybody)
            )
            self._chosen = self._choose(places, exact)
            if self._chosen is not None:
                return self._chosen, ""
            tried += places
        steps = ", ".join(str(place.step) for place in tried)
        return None, f"every remedy has been tried at step {steps}" if tried else NOTHING_GOOD

    def take(self) -> tuple[Remedy, Snapshot]:
        """The remedy of the last plan, which counts as tried from now on, and the state it goes
        back to.
        """
        remedy, self._chosen = self._chosen, None
        assert remedy is not None, "a rewind is decided with a plan only"
        self._tried.append(remedy)
        place, fetched, self._fetched = remedy.place, self._fetched, None
        if place.kind == "checkpoint" and fetched is not None:
            return remedy, fetched
        here = (place.step, place.timeline)
        return remedy, next(
            s for s in self._ring.snapshots if (s.step, s.memory["timeline"]) == here
        )

    def forget(self) -> None:
        """Another run begins."""
        self._tried.clear()

    def _choose(self, places: list[Place], exact: bool) -> Remedy | None:
        """The next remedy whose place can really be had: a checkpoint is read before it is counted
        on.
        """
        policy, rewinds = self._context.config.policy, self._context.budget.rewinds
        while True:
            remedy = choose(places, self._tried, policy, repeatable=exact, rewinds=rewinds)
            if remedy is None or remedy.place.kind == "snapshot":
                return remedy
            told = self._context.agreement.together(partial(self._fetch, remedy.place.step))
            if all(facts["there"] for facts in told):
                return remedy
            self._tried.append(remedy)

    def _fetch(self, step: int) -> dict[str, Any]:
        state = self.archive.read(step) if self.archive is not None else None
        there = state is not None and not self._whole.misfit(state, own_only=True)
        self._fetched = None
        if state is not None and there:
            self._fetched = Snapshot(
                step, 0, state, {"anchor": None, "ruined": False, "level": None}
            )
        return {"there": there}

    def _offer(self, visible: bool) -> dict[str, Any]:
        good = self._ring.snapshots
        if not visible:
            good = [s for s in self._ring.good() if self._level_was_good(s)]
        young = [s for s in self._ring.snapshots if s not in good and self._level_was_good(s)]
        places = [_place(s) for s in good if self._sound(s)]
        if self.archive is not None:
            taken = {step for step, *_ in places}
            places += [
                (step, "checkpoint", 0) for step in self.archive.steps() if step not in taken
            ]
        on_probation = [_place(s) for s in young if self._sound(s)]
        # with parameters that came later, the steps from there on cannot be run again as they were
        grown = {s.step for s in self._ring.snapshots if self._whole.grown_since(s.state)}
        steps = [step for step, *_ in (*places, *on_probation) if step not in grown]
        repeatable = [step for step in steps if self._window.since(step) is not None]
        return {
            "good": [list(p) for p in places],
            "young": [list(p) for p in on_probation],
            "repeatable": repeatable,
        }

    def _level_was_good(self, snapshot: Snapshot) -> bool:
        """Was the loss where this run had been when the snapshot was taken?"""
        level, history = snapshot.memory["level"], self._context.history
        if level is None or history.best is None:
            return not snapshot.memory["ruined"]
        return bool(level <= history.back_limit)


def _place(snapshot: Snapshot) -> tuple[int, str, int]:
    return snapshot.step, "snapshot", snapshot.memory["timeline"]
