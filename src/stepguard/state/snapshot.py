"""Snapshots of the run state: a small ring of copies into memory that is allocated once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from stepguard.state.files import SHARE_OF_FREE, free_memory
from stepguard.state.run_state import SavedState
from stepguard.tensors.torch_private import foreach_copy_

Standing = Literal["young", "good", "bad"]
LEAST = 2
"""Snapshots that must fit: one that is good and one that may become so."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after `step` optimizer steps. Young until its probation is over."""

    step: int
    serial: int
    """Counts over the life of the ring, so that two snapshots of one step differ."""
    state: SavedState
    memory: dict[str, Any] = field(default_factory=dict)
    """What the guard itself remembered then and no file needs."""
    standing: Standing = "young"
    watched_from: int = 0
    """The step its probation counts from: its own, or that of the last incident since."""
    lent: bool = False
    """It is being written to disk and must not be overwritten."""
    held: bool = False
    """The last incident is to be tried again from it: dropped by the ring, it stays as it is."""
    overwritten: bool = False
    """Its memory was needed and holds another state now."""


class Ring:
    """The last few snapshots, oldest first. The newest good one never makes way for a young one."""

    def __init__(
        self,
        size: int,
        limit: int | None,
        *,
        among_ranks: bool = False,
        free: Callable[[], int | None] = free_memory,
    ) -> None:
        """`among_ranks`: other processes must keep the snapshots of the same steps."""
        self._size = size
        self._among_ranks = among_ranks
        self._limit = limit
        self._free = free
        self._serial = 0
        self._spare: list[dict[str, Tensor]] = []
        self._room: int | None = None
        """How many fit, once the first state has been seen."""
        self.snapshots: list[Snapshot] = []
        self._best: Snapshot | None = None
        """The good one with the lowest loss: it stays while there is room for three.

        Among ranks, whose losses differ, the one of the roundest step, which all of them know.
        """

    def keep_best(self) -> None:
        """Choose the best again after a snapshot has become good, by `level` in its memory."""
        good = self._with_standing("good")
        if self._among_ranks:
            self._best = max(good, key=lambda s: (s.step & -s.step, s.step), default=None)
            return
        known = [s for s in good if s.memory.get("level") is not None]
        self._best = min(known, key=lambda s: s.memory["level"], default=None)

    def too_small(self, state: SavedState) -> str:
        """Say why not even two copies of this state fit; empty if they do."""
        if self._room is not None:
            return ""
        size = _size(state)
        limit = self._limit
        whose = "Snapshots.memory"
        if limit is None:
            free = self._free()
            limit = size * self._size
            if free is not None:
                limit = int(free * SHARE_OF_FREE)
            whose = "half of the free memory"
        if limit < LEAST * size:
            return (
                f"the state takes {_amount(size)} and {LEAST} copies of it do not fit into "
                f"{_amount(limit)} ({whose}): no snapshots are taken; checkpoints still are, and "
                "Snapshots(memory=BYTES) sets the limit"
            )
        self._room = min(self._size, limit // max(size, 1))
        return ""

    def take(self, step: int, state: SavedState, *, must: bool = False) -> Snapshot | None:
        """Copy the state; None if every snapshot is still needed. `must` gives up a young one."""
        full = self._room is not None and len(self.snapshots) >= self._room
        if full and not self._give_up_one(must):
            return None
        buffers = self._fitting(state.tensors)
        names = list(buffers)
        foreach_copy_(
            [buffers[n] for n in names], [state.tensors[n] for n in names], non_blocking=True
        )
        self._serial += 1
        kept = SavedState(buffers, state.facts, state.parts)
        snapshot = Snapshot(step, self._serial, kept, watched_from=step)
        self.snapshots.append(snapshot)
        return snapshot

    def good(self) -> list[Snapshot]:
        """List those that are past their probation, newest first."""
        return self._with_standing("good")[::-1]

    def drop(self, unwanted: Callable[[Snapshot], bool]) -> None:
        """Drop every snapshot for which `unwanted` is true."""
        for snapshot in list(self.snapshots):
            if unwanted(snapshot):
                self._forget(snapshot)

    def clear(self) -> None:
        """Drop all, and the memory kept for new ones."""
        self.snapshots = []
        self._spare = []

    def _forget(self, snapshot: Snapshot) -> None:
        self.snapshots.remove(snapshot)
        if snapshot.lent:
            return
        if snapshot.held:
            # It stays where there is memory for a snapshot beside those of the ring.
            size = _size(snapshot.state)
            free = None
            if self._limit is None:
                free = self._free()
            fits = free is None or size <= free * SHARE_OF_FREE
            if self._limit is not None:
                fits = (len(self.snapshots) + 2) * size <= self._limit
            if fits:
                return
        snapshot.overwritten = True
        self._spare.append(snapshot.state.tensors)

    def _give_up_one(self, must: bool) -> bool:
        """Drop the oldest bad one, else the oldest good one but the newest, else a young one."""
        # From the oldest to the second newest: the newest good one stays.
        older_good = self.good()[:0:-1]
        candidates = self._with_standing("bad") + older_good
        # Snapshots that must fit for the best one to stay beside the newest
        if self._best in candidates and (self._room is None or self._room >= 3):
            candidates.remove(self._best)
        if must:
            candidates += self._with_standing("young")
        for snapshot in candidates:
            if not snapshot.lent:
                self._forget(snapshot)
                return True
        return False

    def _with_standing(self, standing: Standing) -> list[Snapshot]:
        return [s for s in self.snapshots if s.standing == standing]

    def _fitting(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return memory of the same shapes: what a dropped snapshot left, else new."""
        kept = self._spare.pop() if self._spare else {}
        fitting: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            memory = kept.get(name)
            if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
                # Copies from an accelerator are asynchronous only into pinned memory.
                pinned = tensor.device.type != "cpu" and torch.accelerator.is_available()
                memory = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned
                )
            fitting[name] = memory
        return fitting


class Cadence:
    """Says at which steps a snapshot is due: the first, and a grid of `GRID` * 2**n steps.

    Grids of different ranks contain each other, so that ranks with different clocks still share
    snapshots.
    """

    GRID = 8
    SHARE = 0.005
    """Share of the training time that copying may take."""
    FIRST = 4
    """Early snapshots, the first after one step: a short run needs something to go back to, too."""

    def __init__(
        self, every: int | Literal["auto"], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every = every
        self.clock = clock
        self._taken = 0
        self._width = self.GRID
        self._since: tuple[float, int] | None = None
        self.quiet = range(0)
        """Steps of which none is due, until a snapshot or a rewind: nobody has to ask at them."""

    def due(self, step: int) -> bool:
        """Is this step on the grid? Step 0 is not: there is nothing to lose yet."""
        if self._since is None:
            self._since = (self.clock(), step)
        width = self._width if self._every == "auto" else self._every
        first = self._every == "auto" and self._taken == 0 and step == self._since[1] + 1
        if step > 0 and (first or step % width == 0):
            return True
        if self._taken:
            self.quiet = range(step, step + width - step % width)
        return False

    def took(self, step: int, seconds: float) -> None:
        """Adapt the grid to what a snapshot cost."""
        now = self.clock()
        since, first = self._since or (now, step)
        self.quiet = range(0)
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
        """Measure the time of a step from here on."""
        self.quiet = range(0)
        self._since = (self.clock(), step)


def _size(state: SavedState) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())


def _amount(size: int) -> str:
    if size >= 2**28:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"
