"""Judge snapshots: one is good once a number of healthy steps have followed it.

A run that has diverged makes no good snapshots. `History.divergence` judges that, by the loss and
by what is measured of the weights here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from stepguard.detect.history import EXPLODED, LEAST_SIZE, SUDDEN, Weights
from stepguard.engine.context import Context
from stepguard.engine.incident.run_facts import update_ratio
from stepguard.sentinel.stored_tensors import root_mean_square
from stepguard.state.run_state import RunState
from stepguard.state.snapshot import Ring, Snapshot
from stepguard.tensors.names import dotted
from stepguard.tensors.values import is_finite


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
            if done - snapshot.watched_from < self._context.config.probation:
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
        """Those tensors that may be non-finite: sentinels, and a bad start that was let pass."""
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
        if context.config.anomalies == "off":
            return ""
        if began is not None and self._diverged is not None and self._diverged[0] == began:
            return history.told(self._diverged[1])
        weights = Weights(growth=self._growth(size))
        if began is not None or weights.grown(EXPLODED):
            update = None
            if history.rates:
                update = update_ratio(context.optimizer, history.rates[-1])
            moved = self._moved_since(context.step - SUDDEN)
            weights = replace(weights, update=update, moved=moved)
        shown = history.divergence(weights)
        why = history.told(shown) if shown else ""
        if why and self._diverged is None:
            after = "its states are sealed as diverged from here on, and last-good stays"
            context.outputs.note("diverged", f"the run has diverged: {why}; {after}", diverged=why)
        elif not why and self._diverged is not None:
            context.outputs.note("diverged", "the run is back from its divergence", diverged="")
        self._diverged = (began, shown) if shown else None
        return why

    def _growth(self, size: Tensor | None) -> float | None:
        """Size of the weights over that before the first step; None where it is not known."""
        first = self._context.first_size
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
