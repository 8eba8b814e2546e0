"""Judge snapshots: one is good once a number of healthy steps have followed it.

A run that has lost what it learned makes no good snapshots. Its loss says so first, and its weights
must confirm it: a new task, a policy or a generator raises the loss as much, on weights that move
as they always did.
"""

from __future__ import annotations

import torch

from stepguard.detect.anomalies import MOVED
from stepguard.detect.history import SUDDEN
from stepguard.engine.context import Context
from stepguard.engine.incident.run_facts import update_ratio
from stepguard.state.run_state import RunState
from stepguard.state.snapshot import Ring, Snapshot
from stepguard.tensors.values import is_finite

LARGE_STEP = 0.1
"""Of the norm of the weights, in one update: a hundred times what is usual."""


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
        self._ruin_confirmed: int | None = None
        """`History.ruined_at` when the weights confirmed it."""

    def commit(self, done: int) -> None:
        """Promote or reject the snapshots whose probation ends after `done` steps."""
        for snapshot in self._ring.snapshots:
            if snapshot.standing != "young":
                continue
            if done - snapshot.watched_from < self._context.config.probation:
                continue
            snapshot.standing = "good"
            if self.ruined or snapshot.memory["ruined"]:
                snapshot.standing = "bad"
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
        """Forget the incidents: another state has been loaded."""
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

    def worth_keeping(self, snapshot: Snapshot) -> bool:
        """Can training go on from it? Finite, and no incident found the weights hurt since."""
        if snapshot.standing == "good":
            return True
        return self.sound(snapshot) and not snapshot.memory.get("hurt")

    def meant_nonfinite(self, names: set[str]) -> set[str]:
        """Those tensors that may be non-finite: sentinels, and a bad start that was let pass."""
        if not names:
            return set()
        endings: list[str] = []
        for label in self._context.on_purpose():
            name = label.partition(":")[2]
            endings += [f"/{name}", f".{name}"]
        return {name for name in names if name.endswith(tuple(endings))}

    # --- what the present weights are worth

    @property
    def ruined(self) -> bool:
        """Is most of what this run had learned lost, by its loss and by its weights?"""
        began = self._context.history.ruined_at
        if self._context.config.anomalies == "off" or began is None:
            self._ruin_confirmed = None
            return False
        if self._ruin_confirmed != began and self._weights_confirm_ruin():
            self._ruin_confirmed = began
        return self._ruin_confirmed == began

    def _weights_confirm_ruin(self) -> bool:
        history = self._context.history
        if history.level > history.far_limit:
            # no task is a hundred times as hard as the first one was
            return True
        if history.rates:
            ratio = update_ratio(self._context.optimizer, history.rates[-1])
            if ratio is not None and ratio >= LARGE_STEP:
                return True
        moved = self._moved_since(self._context.step - SUDDEN)
        return moved is not None and not moved < MOVED

    def moved_since_good(self) -> float | None:
        """Distance of the weights from the newest good snapshot, over their norm; None if none."""
        return self._moved_since(0)

    def _moved_since(self, oldest: int) -> float | None:
        for snapshot in self._ring.good():
            if snapshot.step >= oldest and self.sound(snapshot):
                return self._run_state.distance(snapshot.state)
        return None


def wait_for_copies() -> None:
    """Copies from an accelerator are asynchronous and may still be on their way."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
