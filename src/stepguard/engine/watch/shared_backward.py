"""Several optimizers that step from one backward pass take one decision: all update, or none.

Which optimizers belong together is not declared but seen: two that step after the same backward,
with none in between. From then on the first one to step tests the gradients of the others as well
(one more number in its packet, and they use the norm again), a veto of one drops the updates of
all, and their snapshots are taken at the same moments, so that a rewind takes all of them back. A
GAN's two halves step from backward passes of their own and stay apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.watch.observed_loss import ObservedLoss
from stepguard.sentinel.torch_patches import backwards
from stepguard.state.batch import unwrapped
from stepguard.state.snapshot import Cadence

_of_process: list[weakref.ref[SharedBackward]] = []
"""One entry per watched optimizer of this process."""


class Sharing(Protocol):
    """The driver of one watched optimizer."""

    context: Context
    rewinder: Rewinder
    observed: ObservedLoss
    shared: SharedBackward


class SharedBackward:
    """One watched optimizer among those of the process."""

    def __init__(self, watcher: Sharing) -> None:
        self._watcher = weakref.ref(watcher)
        self.root = unwrapped(watcher.context.model)
        self.serial = -1
        """The last backward pass that left gradients here."""
        self.spent = -1
        """The last backward pass that an update used."""
        self.dropped = -1
        """The backward pass whose update another optimizer's veto drops."""
        self.counts = True
        """Does that dropped update still count as a step of this guard?"""
        self.norm: Tensor | None = None
        """Norm of the gradients that the last update used, still on the device."""
        self._partners: list[weakref.ref[SharedBackward]] = []
        _of_process.append(weakref.ref(self))

    def leave(self) -> None:
        """The guard is closed."""
        _of_process[:] = [ref for ref in _of_process if ref() not in (None, self)]

    @property
    def watcher(self) -> Sharing | None:
        return self._watcher()

    @property
    def partners(self) -> list[SharedBackward]:
        """Optimizers known to step from the same backward pass."""
        if not self._partners:
            return []
        found = [reference() for reference in self._partners]
        return [partner for partner in found if partner is not None]

    def got_gradients(self) -> None:
        """The last backward pass left gradients here."""
        self.serial = backwards()

    def waiting(self) -> list[Sharing]:
        """Optimizers that will step from this backward pass and have not yet."""
        if self.serial < 0:
            return []
        candidates = self.partners
        if not candidates and self.spent < 0:
            candidates = self._presumed_partners()
        found = []
        for other in candidates:
            same = other.serial == self.serial
            unused = other.spent != other.serial and other.dropped != other.serial
            if same and unused and other.watcher is not None:
                found.append(other.watcher)
        return found

    def _presumed_partners(self) -> list[SharedBackward]:
        """Before the first update of all: others on the same model."""
        found = []
        for reference in _of_process:
            other = reference()
            if other is None or other is self:
                continue
            if other.root is self.root and other.spent < 0:
                found.append(other)
        return found

    def norm_of_others(self, waiting: Sequence[Sharing]) -> Tensor | None:
        """Norm of those that will step from the same backward, and of those that have stepped.

        It stays on the device.
        """
        found = []
        for watcher in waiting:
            norm = watcher.observed.take_norm()
            if norm is not None:
                found.append(norm)
        if self.serial >= 0:
            found += self._norms_used()
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        device = found[0].device
        together = torch.stack([norm.float().to(device) for norm in found])
        total: Tensor = torch.linalg.vector_norm(together)
        return total

    def _norms_used(self) -> list[Tensor]:
        """Norms of partners that have stepped from the same backward."""
        found = []
        for partner in self.partners:
            if partner.spent == self.serial and partner.norm is not None:
                found.append(partner.norm)
        return found

    def refused_before(self) -> bool:
        """Was a partner that has stepped from the same backward refused? Waits for the device."""
        return any(not bool(torch.isfinite(norm)) for norm in self._norms_used())

    def stepped(self) -> None:
        """An update has used the last backward pass, vetoed or not."""
        if self.serial < 0 or self.spent == self.serial:
            return
        self.spent = self.serial
        for reference in tuple(_of_process):
            other = reference()
            if other is None or other is self or other in self.partners:
                continue
            if other.spent == self.serial:
                self._partners.append(reference)
                other._partners.append(weakref.ref(self))
                mine = self.watcher
                theirs = other.watcher
                if mine is not None and theirs is not None:
                    follow(mine, theirs)

    def drop(self, *, counts: bool) -> None:
        """Another optimizer of this backward pass was vetoed."""
        self.dropped = self.serial
        self.counts = counts

    @property
    def is_dropped(self) -> bool:
        return self.serial >= 0 and self.dropped == self.serial


class Following(Cadence):
    """A snapshot is due when the leader has just taken one. Knows which of them belong together."""

    def __init__(self, leader: Sharing) -> None:
        super().__init__("auto")
        self._leader = weakref.ref(leader)
        self.together: dict[int, int] = {}
        """The leader's step -> this guard's step."""

    def due(self, step: int) -> bool:
        leader = self._leader()
        return leader is not None and leader.rewinder.snapshots.at(leader.context.step) is not None

    def took(self, step: int, seconds: float) -> None:
        leader = self._leader()
        if leader is not None:
            self.together[leader.context.step] = step

    def rewound(self, step: int) -> None:
        """Nothing is counted here."""

    def step_of_follower(self, leader_step: int) -> int | None:
        return self.together.get(leader_step)

    def step_of_leader(self, own_step: int) -> int | None:
        for leader_step, known in self.together.items():
            if known == own_step:
                return leader_step
        return None


def follow(follower: Sharing, leader: Sharing) -> None:
    """Take snapshots of both at the same moments; where one goes back, the other goes with it."""
    for watcher in (follower, leader):
        if isinstance(watcher.rewinder.snapshots.cadence, Following):
            return  # with a third one: both follow the first
    cadence = Following(leader)
    follower.rewinder.snapshots.cadence = cadence
    # of moments that the leader has no snapshot of
    follower.rewinder.snapshots.ring.drop(lambda _: True)
    leader.rewinder.after_rewind.append(_Along(leader, follower, cadence.step_of_follower))
    follower.rewinder.after_rewind.append(_Along(follower, leader, cadence.step_of_leader))


class _Along:
    """Where one guard has gone back, the other goes to its snapshot of the same moment."""

    moving: ClassVar[set[int]] = set()
    """Guards that are going back together now."""

    def __init__(self, mover: Sharing, other: Sharing, same: Callable[[int], int | None]) -> None:
        self._mover = weakref.ref(mover)
        self._other = weakref.ref(other)
        self._same = same

    def __call__(self) -> None:
        mover = self._mover()
        other = self._other()
        if mover is None or other is None or id(other) in _Along.moving:
            return
        if mover.rewinder.snapshots.at(mover.context.step) is None:
            return
        step = self._same(mover.context.step)
        snapshot = other.rewinder.snapshots.at(step) if step is not None else None
        if snapshot is None:
            name = type(other.context.optimizer).__name__
            other.context.outputs.note(
                "rewind", f"{name} has no snapshot of the same moment: its state stays as it is"
            )
            return
        first = not _Along.moving
        _Along.moving |= {id(mover), id(other)}
        try:
            other.rewinder.put_back(snapshot)
            # the update it is about to drop belongs to the time that is gone
            other.shared.counts = False
        finally:
            if first:
                _Along.moving.clear()
