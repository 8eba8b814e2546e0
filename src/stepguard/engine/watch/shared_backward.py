"""Several optimizers that step from one backward pass take one decision: all of them update, or
none does.

Nobody says which optimizers belong together, so it is seen: two that step after the same backward,
with none in between. From then on the first one to step tests the gradients of the others as well
(one more number in its packet, and they use the norm again), a veto of one drops the updates of
all, and their snapshots are taken at the same moments, so that a rewind takes all of them back. A
GAN's two halves step from backward passes of their own and stay apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.recover.rewind import Recovery
from stepguard.engine.watch.observed_loss import ObservedLoss
from stepguard.sentinel.torch_patches import backwards
from stepguard.state.snapshot import Cadence
from stepguard.state.step import unwrapped

_everybody: list[weakref.ref[SharedBackward]] = []


class Sharing(Protocol):
    """Who watches one optimizer."""

    context: Context
    recovery: Recovery
    observed: ObservedLoss
    shared: SharedBackward


class SharedBackward:
    """One watcher's place among those of the process."""

    def __init__(self, watcher: Sharing) -> None:
        self._watcher = weakref.ref(watcher)
        self.root = unwrapped(watcher.context.model)
        self.serial, self.spent = -1, -1
        """The last backward pass that left gradients here, and the last one an update used."""
        self.dropped = -1
        """The backward pass whose update another optimizer's veto drops."""
        self.counts = True
        """Does that dropped update still count as a step of this guard?"""
        self.norm: Tensor | None = None
        """Of the gradients that the last update used, still on the device."""
        self.partners: weakref.WeakSet[SharedBackward] = weakref.WeakSet()
        _everybody.append(weakref.ref(self))

    def leave(self) -> None:
        """The guard is closed."""
        _everybody[:] = [ref for ref in _everybody if ref() not in (None, self)]

    @property
    def watcher(self) -> Sharing | None:
        return self._watcher()

    def got_gradients(self) -> None:
        """The last backward pass left gradients here."""
        self.serial = backwards()

    def waiting(self) -> list[Sharing]:
        """Those that will step from the same backward and have not yet."""
        if self.serial < 0:
            return []
        fresh = [] if self.partners or self.spent >= 0 else self._strangers()
        waiting = [
            p for p in (*self.partners, *fresh) if p.serial == self.serial and p.spent != p.serial
        ]
        return [p.watcher for p in waiting if p.watcher is not None and p.dropped != p.serial]

    def _strangers(self) -> list[SharedBackward]:
        """Before the first update of all: others on the same model are presumed to belong to it."""
        known = [ref() for ref in _everybody]
        return [
            p
            for p in known
            if p is not None and p is not self and p.root is self.root and p.spent < 0
        ]

    def norm_of_others(self, due: list[Sharing]) -> Tensor | None:
        """Of those that will step from the same backward, and of those that have; still on the
        device.
        """
        norms = [watcher.observed.take_norm() for watcher in due]
        norms += [p.norm for p in self.partners if self.serial >= 0 and p.spent == self.serial]
        found = [norm for norm in norms if norm is not None]
        if len(found) < 2:
            return found[0] if found else None
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.float().to(found[0].device) for norm in found])
        )
        return total

    def refused_before(self) -> bool:
        """Was one that has stepped from the same backward refused for its gradients? Waits for the
        device.
        """
        norms = [p.norm for p in self.partners if p.spent == self.serial and p.norm is not None]
        return any(not bool(torch.isfinite(norm)) for norm in norms)

    def stepped(self) -> None:
        """An update has used the last backward pass, vetoed or not."""
        if self.serial < 0 or self.spent == self.serial:
            return
        self.spent = self.serial
        for other in [ref() for ref in _everybody]:
            if other is not None and other is not self and other.spent == self.serial:
                self._pair(other)

    def drop(self, *, counts: bool) -> None:
        """Another optimizer of this backward pass was vetoed."""
        self.dropped, self.counts = self.serial, counts

    @property
    def is_dropped(self) -> bool:
        return self.serial >= 0 and self.dropped == self.serial

    def _pair(self, earlier: SharedBackward) -> None:
        if earlier in self.partners:
            return
        self.partners.add(earlier)
        earlier.partners.add(self)
        mine, theirs = self.watcher, earlier.watcher
        if mine is not None and theirs is not None:
            follow(mine, theirs)


class Following(Cadence):
    """A snapshot is due when the leader has just taken one. Knows which of them belong together."""

    def __init__(self, leader: Sharing) -> None:
        super().__init__("auto")
        self._leader = weakref.ref(leader)
        self.together: dict[int, int] = {}
        """The leader's step -> this guard's step."""

    def due(self, step: int) -> bool:
        leader = self._leader()
        return leader is not None and leader.recovery.snapshots.at(leader.context.step) is not None

    def took(self, step: int, seconds: float) -> None:
        leader = self._leader()
        if leader is not None:
            self.together[leader.context.step] = step

    def rewound(self, step: int) -> None:
        """Nothing is counted here."""


def follow(follower: Sharing, leader: Sharing) -> None:
    """From now on both have snapshots of the same moments, and where one goes back the other goes
    with it.
    """
    if isinstance(follower.recovery.snapshots.cadence, Following) or isinstance(
        leader.recovery.snapshots.cadence, Following
    ):
        return  # with a third one: both follow the first
    cadence = Following(leader)
    follower.recovery.snapshots.cadence = cadence
    follower.recovery.snapshots.ring.drop(
        lambda _: True
    )  # of moments that the leader has no snapshot of
    leader.recovery.after_rewind.append(
        _Along(leader, follower, lambda step: cadence.together.get(step))
    )
    follower.recovery.after_rewind.append(
        _Along(follower, leader, lambda step: _key(cadence.together, step))
    )


class _Along:
    """Where one guard has gone back, the other goes to its snapshot of the same moment."""

    moving: ClassVar[set[int]] = set()
    """Guards that are going back together now."""

    def __init__(self, mover: Sharing, other: Sharing, same: Callable[[int], int | None]) -> None:
        self._mover, self._other, self._same = weakref.ref(mover), weakref.ref(other), same

    def __call__(self) -> None:
        mover, other, moving = self._mover(), self._other(), _Along.moving
        if (
            mover is None
            or other is None
            or id(other) in moving
            or mover.recovery.snapshots.at(mover.context.step) is None
        ):
            return
        step = self._same(mover.context.step)
        snapshot = other.recovery.snapshots.at(step) if step is not None else None
        if snapshot is None:
            name = type(other.context.optimizer).__name__
            other.context.outputs.note(
                "rewind", f"{name} has no snapshot of the same moment: its state stays as it is"
            )
            return
        first = not moving
        moving |= {id(mover), id(other)}
        try:
            other.recovery.put_back(snapshot)
            other.shared.counts = (
                False  # the update it is about to drop belongs to the time that is gone
            )
        finally:
            if first:
                moving.clear()


def _key(pairs: dict[int, int], value: int) -> int | None:
    return next((key for key, known in pairs.items() if known == value), None)
