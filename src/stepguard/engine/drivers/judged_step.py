"""The verdict of a watched step: judge it, decide with other optimizers, commit or put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepguard.detect.judge import alarming
from stepguard.engine.context import Context
from stepguard.engine.drivers.fused import read_later
from stepguard.engine.drivers.fused_watch import DROPPED_FOR_ANOTHER, FusedWatchedStep
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.incident.outcome import let_through
from stepguard.engine.protect import Protection
from stepguard.engine.reader import Pending
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.transaction import VetoedUpdate
from stepguard.engine.watch.shared_backward import Sharing
from stepguard.engine.wiring import Wiring
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK
from stepguard.state.step import Step


class UpdateNotReached:
    """An update that the loop has not come to: only buffers have to be put back."""

    def __init__(self, driver: JudgedStep) -> None:
        self._driver = driver

    def stop(self) -> None:
        """Nothing to stop."""

    def restore_buffers(self) -> str:
        return self._driver.restore_buffers()


class JudgedStep(FusedWatchedStep):
    """The part of a watch driver that judges the step at hand."""

    def __init__(
        self, context: Context, protect: Protection, rewinder: Rewinder, wiring: Wiring
    ) -> None:
        super().__init__(context, protect, rewinder, wiring)
        self._not_reached = UpdateNotReached(self)
        self._dropped_late = False
        """The update is dropped for an optimizer that was refused before this one stepped."""
        self._dropped_for: JudgedStep | None = None
        """Another optimizer of the same backward pass, whose incident drops this update."""

    # --- the verdict ----------------------------------------------------------------------------

    def check(self, *, again: bool = False) -> None:
        """Read and judge gradients before they are used. `again`: a further evaluation."""
        self._end_trace()
        late = read_later(self.context)
        sharing = [] if again else self.shared.waiting()
        pending: Pending | None = None
        if self.protect.armed:
            with self.protect.region:
                pending = self._issue_with(sharing)
        if pending is None:
            self._check_disarmed()
            return
        self.wiring.update(pending.norm)
        if late:
            with self.protect.region:
                self._flag(pending)
            self.looks.before_update()
            return
        reading = self._read(pending)
        if reading is None:
            return
        damaged = self._damaged_peer(sharing, reading)
        if damaged is None:
            self._judge(self._step(reading), reading, self, again=again)
        self._decide_together(sharing, pending, damaged)
        if not self.vetoing and self._check.undo is None:
            self._check.prepare(reading, at_risk=pending.at_risk)
            self._veto.give_back_later(self._check.give_back)
            self.looks.before_update()

    def _issue_with(self, sharing: list[Sharing]) -> Pending:
        """Gradients of other optimizers from the same backward pass are tested in one packet."""
        self.reader.start()
        others = self.shared.norm_of_others(sharing)
        pending = self.reader.issue(self.observed.losses, self.observed.norm(), others)
        self.shared.norm = pending.norm.total if pending.norm is not None else None
        return pending

    def _check_disarmed(self) -> None:
        """Ranks that are still armed may refuse the step; a scaler refuses by itself."""
        refused = self.context.agreement.stay(self.context.step, self.context.parameters)
        if refused and not self.context.scaling():
            self._refuse()

    def _read(self, pending: Pending) -> Reading | None:
        if self.protect.armed:
            with self.protect.region:
                return self.transaction.read(pending)
        return None

    def _judge(
        self, step: Step, reading: Reading, update: VetoedUpdate, *, again: bool = False
    ) -> None:
        """Judge the step, and respond to a bad one."""
        reading, verdict = self.transaction.assess(step, reading)
        if again and verdict.finite_anomaly:
            verdict = OK  # along a line search losses say nothing about the run
        if not again or verdict.bad:
            self._reading = reading
        self.transaction.note(reading, verdict)
        if not verdict.bad:
            return
        self._incident = self.transaction.respond(step, reading, verdict, update)
        self.vetoing = not let_through(verdict, self._incident)
        if not self.vetoing:
            self._veto.release()

    def _judge_unreached(self) -> Reading | None:
        """Read and judge gradients of an update that the loop has not come to."""
        self._begin()
        self._end_trace()
        pending: Pending | None = None
        if self.protect.armed:
            with self.protect.region:
                pending = self._issue()
        reading = self._read(pending) if pending is not None else None
        if reading is not None:
            self._judge(self._step(reading), reading, self._not_reached)
        return reading

    def _refuse(self) -> None:
        """Drop an update for no reason of this optimizer's own."""
        self.stop()
        self.vetoing = True

    # --- several optimizers, one backward pass --------------------------------------------------

    def _damaged_peer(self, sharing: list[Sharing], reading: Reading) -> JudgedStep | None:
        """The one whose weights are damaged, where this guard's own are not."""
        if not sharing or not alarming(reading) or not self.protect.armed:
            return None
        with self.protect.region:
            if stored_trouble(self.context):
                return None
            for peer in sharing:
                if isinstance(peer, JudgedStep) and stored_trouble(peer.context):
                    return peer
        return None

    def _decide_together(
        self, sharing: list[Sharing], pending: Pending, damaged: JudgedStep | None
    ) -> None:
        """What one optimizer of a backward pass finds bad is dropped by all."""
        if self.vetoing:
            for peer in sharing:
                peer.shared.drop(counts=True)
            return
        if not pending.others_bad and damaged is None:
            return
        self._dropped_for = _first_bad([damaged] if damaged is not None else sharing)
        if self._dropped_for is None:
            self._dropped_late = self.shared.refused_before()
            if self._dropped_late:
                self._refuse()
            return
        for peer in sharing:
            if peer is not self._dropped_for:
                peer.shared.drop(counts=True)
        self._refuse()

    def found_bad(self) -> bool:
        """Asked by another optimizer before this one steps: does its own reading veto?"""
        self._judge_unreached()
        return self.vetoing

    # --- the end of the update ------------------------------------------------------------------

    def _vetoed(self) -> None:
        """The optimizer had nothing to do: put back what it moved all the same, and conclude."""
        peer = self._dropped_for
        dropped_by_peer = self.shared.is_dropped
        self.dropped = True
        self._dropped_for = None
        incident = self._with_not_restored(self._incident, self._put_back())
        self._close_books(self._step(self._reading), self._reading, committed=False)
        if dropped_by_peer or peer is not None or self._dropped_late:
            self.context.outputs.note("veto", DROPPED_FOR_ANOTHER)
        self._dropped_late = False
        self._end_step(counts=not dropped_by_peer or self.shared.counts)
        self._conclude(incident, hold=True)
        self._timeline = self.context.budget.rewinds
        if peer is not None:
            peer._vetoed()
            peer.shared.drop(counts=False)  # its own call of step is still to come

    def _put_back(self) -> str:
        """Undo what moved; in words what cannot be undone. Runs when disarmed, too."""
        left = []
        with self.protect.part("undoing a vetoed update"):
            left.append(self._veto.put_back())
        with self.protect.part("buffers before the step"):
            left.append(self.restore_buffers())
        return "; ".join(words for words in left if words)

    def _with_not_restored(self, incident: Incident | None, left: str) -> Incident | None:
        """Say in the decision what could not be put back, or on a line of its own."""
        if not left:
            return incident
        if incident is None or incident.decision is None:
            self.context.outputs.note("veto", f"the update was vetoed, but {left}")
            return incident
        return replace(incident, decision=replace(incident.decision, not_restored=left))

    def _committed(self) -> None:
        """The optimizer has stepped; an update that made something non-finite is undone."""
        reading = self._reading
        step = self._step(reading)
        undone = self._check.undone(reading) if reading is not None else None
        if undone is not None:
            self._reading, verdict = self.transaction.assess(step, undone)
            self._incident = self.transaction.respond(step, self._reading, verdict, None)
            self._vetoed()
            return
        self.dropped = False
        if self.protect.armed:
            with self.protect.region:
                self.reader.after_update()
        self._close_books(step, reading, committed=True)
        self._end_step()


def _first_bad(asked: Sequence[Sharing]) -> JudgedStep | None:
    """The first of these drivers whose own reading vetoes its update."""
    for peer in asked:
        if isinstance(peer, JudgedStep) and peer.found_bad():
            return peer
    return None
