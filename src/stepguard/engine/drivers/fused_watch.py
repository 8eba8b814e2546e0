"""A watched loop with a fused optimizer: the kernel takes the verdict from the device, the host
reads it later.
"""

from __future__ import annotations

import torch

from stepguard.engine.drivers.fused import LateUpdate, found_inf
from stepguard.engine.drivers.watched_step import Watching
from stepguard.engine.reader import Pending
from stepguard.engine.result import StepResult
from stepguard.records import Reading
from stepguard.records.verdict import Verdict
from stepguard.state.buffers import BufferKeeper


class LateWatching(Watching):
    """The part of a watcher that concerns updates which have been issued and not been read."""

    _late: LateUpdate | None = None
    _own_flag = False

    def _flag(self, pending: Pending) -> None:
        """Fused: tell the kernel, read later. A scaler's own flag is kept and joined."""
        optimizer = self.context.optimizer
        late, theirs = (
            LateUpdate(self.context, self._step(None), pending, StepResult()),
            found_inf(optimizer),
        )
        if theirs is not None:
            late.flag = torch.maximum(theirs, late.flag.to(theirs))
        optimizer.found_inf = late.flag  # type: ignore[attr-defined]
        self._own_flag, self._late = theirs is None, late

    def _issued(self, late: LateUpdate) -> None:
        """A fused update is on its way. Changed buffers cannot wait: the next forward needs them
        put back.
        """
        self.shield.call(None, self.reader.after_update)
        self.shield.call(None, late.issued, self.context)
        try:
            self.dropped = False
            if not self._remembered or self.context.buffers.changing():
                self.dropped = self.settle(inside=True)
            else:
                late.step.buffers = BufferKeeper(())
        finally:
            self._end_step()

    def settle(self, *, inside: bool = False) -> bool:
        """Read a fused step whose verdict is still on the device; `inside` optimizer.step() or
        later.

        True when it had been vetoed, and what the loop has done since has been taken back.
        """
        late, self._late = self._late, None
        if late is None:
            return False
        reading = self.shield.call(None, late.read, self.reader)
        if reading is None:
            self._book(late.step, None, went_through=not bool(late.flag))
            return False
        late.step.scale = reading.scale or 1.0
        reading, verdict = self._assess(late.step, reading)
        if verdict.severity == "note":
            self.shield.spare(None, self.pipeline.note, reading, verdict)
        together = late.pending.others_bad
        vetoed = late.vetoed(reading) or together
        if vetoed and not verdict.bad and not together:
            self.hold.scaler_skipped()
        elif vetoed:
            late.take_back(self.context, calibrating=False, schedule=self.hold.every_step)
        self._finish_late(late, reading, verdict, vetoed=vetoed, inside=inside)
        if vetoed and self._commits in self._averaged.values():
            self.recovery.say(
                "veto", "an AveragedModel took in the weights once more after the vetoed update"
            )
        if together and not verdict.bad:
            self.recovery.say(
                "veto",
                "update dropped: another optimizer of the same backward pass found a bad step",
            )
        return vetoed and (verdict.bad or together)

    def _finish_late(
        self, late: LateUpdate, reading: Reading, verdict: Verdict, *, vetoed: bool, inside: bool
    ) -> None:
        if not verdict.bad:
            self._book(late.step, reading, went_through=not vetoed)
            return
        incident = self.shield.call(
            None, self.pipeline.respond, late.step, reading, verdict, committed=not vetoed
        )
        self._book(late.step, reading, went_through=not vetoed)
        self._apply(incident, hold=vetoed and inside)
