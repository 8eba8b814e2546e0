"""A watched loop with a fused optimizer: the kernel takes the verdict, the host reads it later."""

from __future__ import annotations

import torch

from stepguard.engine.drivers.fused import FusedUpdate
from stepguard.engine.drivers.optimizer_kinds import found_inf
from stepguard.engine.drivers.watched_step import WatchedStep
from stepguard.engine.reader import Pending
from stepguard.engine.result import StepResult
from stepguard.records import Reading
from stepguard.records.verdict import Verdict
from stepguard.state.buffers import BufferKeeper

DROPPED_FOR_ANOTHER = "update dropped: another optimizer of the same backward pass found a bad step"


class FusedWatchedStep(WatchedStep):
    """The part of a watch driver that is about updates which were issued and not read yet."""

    _fused: FusedUpdate | None = None
    _own_flag = False
    """`optimizer.found_inf` was set by the guard, not by the user's scaler."""

    def _flag(self, pending: Pending) -> None:
        """Tell the kernel and read later. The flag of a scaler is kept and joined."""
        optimizer = self.context.optimizer
        fused = FusedUpdate(self.context, self._step(None), pending, StepResult())
        theirs = found_inf(optimizer)
        if theirs is not None:
            fused.flag = torch.maximum(theirs, fused.flag.to(theirs))
        optimizer.found_inf = fused.flag  # type: ignore[attr-defined]
        self._own_flag = theirs is None
        self._fused = fused

    def _issued(self, fused: FusedUpdate) -> None:
        """A fused update is on its way."""
        if self.protect.armed:
            with self.protect.region:
                self.reader.after_update()
                fused.issued(self.context)
        try:
            self.dropped = False
            changed = self.context.buffers.changing() or bool(self.context.attached)
            if not self._remembered or changed:
                # changed buffers cannot wait: the next forward needs them put back
                self.dropped = self.settle(inside=True)
            else:
                fused.step.buffers = BufferKeeper(())
        finally:
            self._end_step()

    def waits_for_ranks(self) -> bool:
        """Was the last step refused by the device, and have the ranks not dealt with it yet?"""
        return self._fused is not None and self._fused.waits_for_ranks(self.transaction)

    def settle(self, *, inside: bool = False) -> bool:
        """Read a fused step whose verdict is still on the device; `inside`: in optimizer.step().

        True when it was vetoed, and what the loop has done since has been taken back.
        """
        fused = self._fused
        self._fused = None
        if fused is None:
            return False
        reading = fused.read(self.transaction)
        if reading is None:
            self._close_books(fused.step, None, committed=not bool(fused.flag))
            return False
        reading, verdict = self.transaction.assess(fused.step, reading)
        self.transaction.note(reading, verdict)
        together = fused.pending.others_bad
        refused = verdict.bad or together
        vetoed = fused.vetoed(reading) or together
        if vetoed:
            self._take_back(fused, refused=refused)
        self._finish_fused(fused, reading, verdict, vetoed=vetoed, inside=inside)
        if together and not verdict.bad:
            self.context.outputs.note("veto", DROPPED_FOR_ANOTHER)
        return vetoed and refused

    def _take_back(self, fused: FusedUpdate, *, refused: bool) -> None:
        """The kernel left everything alone: take back what the host did in the meantime."""
        if not refused:
            self.rollback.scaler_skipped()
            return
        every_step = self.rollback.every_step
        fused.take_back(self.context, calibrating=False, schedule=every_step)
        if self._commits in self._averaged.values():
            told = "an AveragedModel took in the weights once more after the vetoed update"
            self.context.outputs.note("veto", told)

    def _finish_fused(
        self, fused: FusedUpdate, reading: Reading, verdict: Verdict, *, vetoed: bool, inside: bool
    ) -> None:
        if not verdict.bad:
            self._close_books(fused.step, reading, committed=not vetoed)
            return
        incident = self.transaction.respond(
            fused.step, reading, verdict, None, committed=not vetoed
        )
        self._close_books(fused.step, reading, committed=not vetoed)
        self._conclude(incident, hold=vetoed and inside)
