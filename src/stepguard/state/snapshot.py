"""RunState states in memory: a small ring of copies into memory that is allocated once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from stepguard.state.host_memory import free_memory
from stepguard.state.run_state import SavedState
from stepguard.tensors.torch_private import foreach_copy_

Standing = Literal["young", "good", "bad"]
SHARE_OF_FREE = 0.5
"""Of the memory that is free, where nobody sets a limit."""
LEAST = 2
"""Snapshots that must fit: one that is good and one that may become so."""
KEEPS_BEST = 3
"""Snapshots that must fit for the best one to stay beside the newest."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after `step` optimizer steps. Young until its probation is over."""

    step: int
    serial: int
    """Counts over the life of the ring, so that two snapshots of one step can be told apart."""
    state: SavedState
    memory: dict[str, Any] = field(default_factory=dict)
    """What the guard itself remembered then and no file needs."""
    standing: Standing = "young"
    watched_from: int = 0
    """The step its probation counts from: its own, or that of the last incident since."""
    lent: bool = False
    """Somebody is writing it to disk: it must not be overwritten."""


class Ring:
    """The last few snapshots, oldest first. The newest good one is never given up for a young one."""

    def __init__(
        self, size: int, limit: int | None, *, free: Callable[[], int | None] = free_memory
    ) -> None:
        self._size, self._limit, self._free = size, limit, free
        self._serial = 0
        self._spare: list[dict[str, Tensor]] = []
        self._room: int | None = None
        """How many fit, once the first state has been seen."""
        self.snapshots: list[Snapshot] = []
        self._best: Snapshot | None = None
        """The good one with the lowest level of the loss: it stays while there is room for three.
        """

    def keep_best(self) -> None:
        """A snapshot has become good: is its level the lowest? What `memory` calls `level` says."""
        known = [
            s for s in self.snapshots if s.standing == "good" and s.memory.get("level") is not None
        ]
        self._best = min(known, key=lambda s: s.memory["level"], default=None)

    def too_small(self, state: SavedState) -> str:
        """Why not even two copies of this state fit, in words; empty when they do."""
        if self._room is not None:
            return ""
        size = sum(t.numel() * t.element_size() for t in state.tensors.values())
        limit, whose = self._limit, "GuardConfig.snapshot_memory"
        if limit is None:
            free = self._free()
            limit = int(free * SHARE_OF_FREE) if free is not None else size * self._size
            whose = "half of the free memory"
        if limit < LEAST * size:
            return (
                f"the state takes {_amount(size)} and {LEAST} copies of it do not fit into "
                f"{_amount(limit)} ({whose}): "
                "no snapshots are taken; checkpoints still are, and "
                "GuardConfig(snapshot_memory=BYTES) sets the limit"
            )
        self._room = min(self._size, limit // max(size, 1))
        return ""

    def take(self, step: int, state: SavedState, *, must: bool = False) -> Snapshot | None:
        """Copy the state; None where every place holds one that is still needed. `must` gives up a
        young one.
        """
        if (
            self._room is not None
            and len(self.snapshots) >= self._room
            and not self._give_up_one(must)
        ):
            return None
        buffers = self._fitting(state.tensors)
        names = list(buffers)
        foreach_copy_(
            [buffers[n] for n in names], [state.tensors[n] for n in names], non_blocking=True
        )
        self._serial += 1
        snapshot = Snapshot(step, self._serial, SavedState(buffers, state.facts), watched_from=step)
        self.snapshots.append(snapshot)
        return snapshot

    def good(self) -> list[Snapshot]:
        """Those that are past their probation, newest first."""
        return [s for s in reversed(self.snapshots) if s.standing == "good"]

    def drop(self, unwanted: Callable[[Snapshot], bool]) -> None:
        for snapshot in [s for s in self.snapshots if unwanted(s)]:
            self._forget(snapshot)

    def clear(self) -> None:
        self.snapshots, self._spare = [], []

    def _forget(self, snapshot: Snapshot) -> None:
        self.snapshots.remove(snapshot)
        if not snapshot.lent:
            self._spare.append(snapshot.state.tensors)

    def _give_up_one(self, must: bool) -> bool:
        """The oldest bad one, else the oldest good one if there is a newer, else perhaps a young
        one.
        """
        good = self.good()
        candidates = [s for s in self.snapshots if s.standing == "bad"] + good[:0:-1]
        if self._room is None or self._room >= KEEPS_BEST:
            candidates = [s for s in candidates if s is not self._best]
        if must:
            candidates += [s for s in self.snapshots if s.standing == "young"]
        free = next((s for s in candidates if not s.lent), None)
        if free is not None:
            self._forget(free)
        return free is not None

    def _fitting(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Memory of the same shapes: what a dropped snapshot left, else new."""
        kept, self._spare = (self._spare[-1] if self._spare else {}), self._spare[:-1]
        return {
            n: kept[n] if n in kept and _same(kept[n], t) else _empty(t) for n, t in tensors.items()
        }


class Cadence:
    """Says at which steps a snapshot is due: the first, and a grid whose width is a power of two
    times `GRID`.

    Grids of different ranks contain each other, so that ranks with different clocks still share
    snapshots.
    """

    GRID = 8
    SHARE = 0.005
    """Of the time of training that copying may take."""
    FIRST = 4
    """Snapshots that come early, the first of them after one step: a short run, too, has something
    to go back to.
    """

    def __init__(
        self, every: int | Literal["auto"], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every, self.clock = every, clock
        self._taken = 0
        self._width = self.GRID
        self._since: tuple[float, int] | None = None

    def due(self, step: int) -> bool:
        """Is this step on the grid? Step 0 is not: there is nothing to lose yet."""
        if self._since is None:
            self._since = (self.clock(), step)
        if self._every != "auto":
            return step > 0 and step % self._every == 0
        return step > 0 and (
            step % self._width == 0 or (self._taken == 0 and step == self._since[1] + 1)
        )

    def took(self, step: int, seconds: float) -> None:
        """A snapshot took so long: the next ones come as often as their share of the time allows."""
        now = self.clock()
        since, first = self._since or (now, step)
        self._taken += 1
        self._since = (now, step)
        if self._taken < self.FIRST or step <= first:
            return
        per_step = max((now - seconds - since) / (step - first), 1e-9)
        needed = seconds / (self.SHARE * per_step)
        self._width = self.GRID
        while self._width < needed:
            self._width *= 2

    def rewound(self, step: int) -> None:
        """Time is counted anew from here."""
        self._since = (self.clock(), step)


def _same(buffer: Tensor, live: Tensor) -> bool:
    return (buffer.shape, buffer.dtype) == (live.shape, live.dtype)


def _empty(live: Tensor) -> Tensor:
    """Host memory of the same kind, pinned where that makes copies from an accelerator
    asynchronous.
    """
    pinned = live.device.type != "cpu" and torch.accelerator.is_available()
    return torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=pinned)


def _amount(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
