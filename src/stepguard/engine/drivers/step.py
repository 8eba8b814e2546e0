"""`guard.step`: the guard runs the step, so it can replay it exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepguard.engine.context import Context
from stepguard.engine.drivers.fused import (
    FusedUpdate,
    kernel_unscales,
    leaves_unscaling,
    read_later,
)
from stepguard.engine.drivers.outer_optimizer import step_without_gradients, update
from stepguard.engine.drivers.scaler import hold_scaler, scaled, unscale, update_scaler
from stepguard.engine.drivers.step_end import StepEnd, UpdateNotCalled
from stepguard.engine.drivers.unguarded import unguarded_step, unguarded_update
from stepguard.engine.drivers.update_check import UpdateCheck
from stepguard.engine.incident.exceptions import Exceptions
from stepguard.engine.incident.outcome import (
    leaves_out,
    let_through,
    rewinds,
    skipped_after_all,
    with_left_out,
)
from stepguard.engine.protect import Protection
from stepguard.engine.reader import MicroLoss, Pending, micro_loss
from stepguard.engine.recover.partial_step import (
    good_micro_batches,
    micro_batch_words,
    without_samples,
)
from stepguard.engine.recover.rerun import run_again
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.result import StepResult
from stepguard.engine.transaction import Transaction
from stepguard.records import Incident, Reading
from stepguard.records.verdict import Verdict
from stepguard.sentinel.gradients import clip, gradient_norm, scale_gradients
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.step import LossFn, Step


class StepDriver:
    """One optimizer step from zero_grad to scheduler.step, with the transaction in between."""

    def __init__(self, context: Context, protect: Protection, rewinder: Rewinder) -> None:
        self.context = context
        self.protect = protect
        self.rewinder = rewinder
        self.transaction = Transaction(context, protect, rewinder)
        self.reader = self.transaction.reader
        self.step_end = StepEnd(context, protect, rewinder)
        self.looks = self.step_end.looks
        self.exceptions = Exceptions(context, protect, self.transaction)
        self.not_called = UpdateNotCalled(context)
        self._fused: FusedUpdate | None = None
        """An update whose verdict is still on the device."""

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """One step under protection."""
        self.settle()
        step = self.begin(loss_fn, micro_batches)
        if step is None:
            return unguarded_step(self.context, loss_fn, micro_batches)
        try:
            with self.looks.during(micro_batches):
                losses = self.forward_backward(step)
        except Exception as error:
            incident = self.exceptions.in_step(step, error)
            if incident is None:
                raise
            return self.without_step(incident)
        with kernel_unscales(self.context):
            pending = self._issue(losses)
            if pending is not None and read_later(self.context):
                return self._update_fused(step, pending)
        if pending is None:
            return unguarded_update(self.context)
        return self._update(step, pending)

    def between(self) -> None:
        """The loop is between two steps; a snapshot needs the last one read."""
        if self.rewinder.snapshots.due():
            self.settle()
        self.rewinder.snapshots.between_steps()

    # --- around the user's code -----------------------------------------------------------------

    def begin(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> Step | None:
        """Remember what the step starts from; None where the guard is disarmed."""
        if not self.protect.armed:
            return None
        context = self.context
        with self.protect.part("snapshots and checkpoints"):
            self.rewinder.snapshots.between_steps()
        with self.protect.region:
            context.remember()
            self.reader.start()
            return Step(
                index=context.step,
                model=context.model,
                optimizer=context.optimizer,
                modules=context.modules,
                buffers=context.buffers,
                loss_fn=loss_fn,
                micro_batches=micro_batches,
                clip_norm=context.config.clip_norm,
                sharded=context.sharded,
            )
        return None

    def forward_backward(self, step: Step, only: Sequence[int] | None = None) -> list[MicroLoss]:
        """Run the user's code; with `only`, some micro-batches with the random numbers they had."""
        context = self.context
        assert step.loss_fn is not None
        context.stepped.zero_grad(set_to_none=True)
        losses = []
        for index, batch in enumerate(step.micro_batches):
            if only is None:
                step.rng.append(capture_rng())
            elif index not in only:
                continue
            else:
                restore_rng(step.rng[index])
            loss, seen = micro_loss(step.loss_fn(batch), batch, context)
            losses.append(seen)
            self._announce(seen)
            torch.autograd.backward(scaled(context, loss))
        if only is not None or not leaves_unscaling(context):
            unscale(context)
        return losses

    def _announce(self, loss: MicroLoss) -> None:
        """Before backward, whose exchange of gradients tells other ranks of a bad loss."""
        if self.protect.armed:
            with self.protect.region, self.looks.paused():
                self.reader.announce(loss.total, summed_in_half=loss.summed_in_half)

    def _issue(self, losses: list[MicroLoss]) -> Pending | None:
        if self.protect.armed:
            with self.protect.region:
                return self.reader.issue(losses)
        return None

    def _read(self, pending: Pending) -> Reading | None:
        if self.protect.armed:
            with self.protect.region:
                return self.transaction.read(pending)
        return None

    def without_step(self, incident: Incident) -> StepResult:
        """The policy goes on after an exception, without this step."""
        self.step_end.dropped(incident.reading)
        self.context.step += 1
        return StepResult().resolve(incident.reading, committed=False, incident=incident)

    # --- the verdict, and what follows from it --------------------------------------------------

    def _update(self, step: Step, pending: Pending) -> StepResult:
        """Read, agree and judge; then commit or refuse."""
        reading = self._read(pending)
        if reading is None:
            return unguarded_update(self.context)
        step.scale = reading.scale or 1.0
        reading, verdict = self.transaction.assess(step, reading)
        self.transaction.note(reading, verdict)
        if verdict.bad:
            return self._refuse(step, pending, reading, verdict)
        if verdict.kind == "scale_calibration":
            # a loop would have clipped before its scaler refused the update
            self._clip(pending, reading, outliers_kept_out=False)
            update_scaler(self.context)
            self._end(step, reading, committed=False)
            return StepResult().resolve(reading, committed=False)
        return self._commit(step, pending, reading)

    def _refuse(
        self, step: Step, pending: Pending, reading: Reading, verdict: Verdict
    ) -> StepResult:
        """Respond to a bad step whose update has not been made."""
        end = capture_rng()
        incident = self.transaction.respond(step, reading, verdict, self.not_called)
        if let_through(verdict, incident):
            return self._commit(step, pending, reading, incident)
        if leaves_out(incident):
            assert incident is not None
            partial = self._commit_the_rest(step, incident)
            restore_rng(end)
            if partial is not None:
                return partial
            incident = skipped_after_all(incident)
        return self._drop(step, reading, incident)

    def _drop(self, step: Step, reading: Reading, incident: Incident | None) -> StepResult:
        """Leave buffers, scaler and schedule as if this batch had never come."""
        self.context.put_back()
        hold_scaler(self.context)
        step_without_gradients(self.context)
        self.step_end.dropped(reading)
        self.context.step += 1
        incident = self.transaction.conclude(incident)
        second = run_again(self, step, incident)
        if second is not None:
            return second
        return StepResult().resolve(reading, committed=False, incident=incident)

    def _commit(
        self,
        step: Step,
        pending: Pending,
        reading: Reading,
        incident: Incident | None = None,
        result: StepResult | None = None,
    ) -> StepResult:
        """Clip and update. An update that makes something non-finite is undone and refused."""
        context = self.context
        check = UpdateCheck(context, self.protect)
        check.prepare(reading, at_risk=pending.at_risk)
        self._clip(pending, reading, outliers_kept_out=check.give_back is not None)
        self.looks.before_update()
        updated = update(context)
        if check.give_back is not None:
            check.give_back()
        if not updated:
            return self._end_without_update(step, reading)
        undone = check.undone(reading)
        if undone is not None:
            reading, verdict = self.transaction.assess(step, undone)
            return self._refuse(step, pending, reading, verdict)
        self.after_update()
        self._end(step, reading, committed=True, incident=incident)
        incident = self.transaction.conclude(incident)
        return (result or StepResult()).resolve(reading, committed=True, incident=incident)

    def _end_without_update(self, step: Step, reading: Reading) -> StepResult:
        """A wrapper around the optimizer has refused a step that is good here."""
        self.context.put_back()
        hold_scaler(self.context)
        self._end(step, reading, committed=False)
        return StepResult().resolve(reading, committed=False)

    def _clip(self, pending: Pending, reading: Reading, *, outliers_kept_out: bool) -> None:
        context = self.context
        norm = pending.norm
        known = reading.grad_norm
        if outliers_kept_out and not context.sharded:
            # sharded: other ranks may have kept none out, and would not take part in a new norm
            norm = gradient_norm([p.grad for p in context.parameters if p.grad is not None])
            known = None
        if context.config.clip_norm is not None and norm is not None:
            clip(context.parameters, context.config.clip_norm, norm, known=known)

    def after_update(self) -> None:
        """An update really happened: scaler and schedule advance."""
        if self.protect.armed:
            with self.protect.region:
                self.reader.after_update()
        update_scaler(self.context)
        self.context.advance_schedule()

    def _end(
        self, step: Step, reading: Reading, *, committed: bool, incident: Incident | None = None
    ) -> None:
        if committed:
            self.step_end.committed(step, reading)
        else:
            self.step_end.dropped(reading)
        if self.protect.armed:
            with self.protect.part("steps kept for repetition"):
                self._keep(step, reading, incident, committed=committed)
        if step.index == self.context.step:
            self.context.step += 1

    def _keep(
        self, step: Step, reading: Reading, incident: Incident | None, *, committed: bool
    ) -> None:
        """Keep what went as it should, to run it again; what a bad step left behind cannot be."""
        if incident is None:
            self.rewinder.snapshots.keep(step, reading.loss, reading.lr)
        elif committed:
            self.rewinder.snapshots.kept.broken(step.index)

    # --- the good part of a bad step ------------------------------------------------------------

    def _commit_the_rest(
        self, step: Step, incident: Incident, result: StepResult | None = None
    ) -> StepResult | None:
        """Update without the guilty samples, else without bad micro-batches; None if neither."""
        rest: Step | None = None
        good: list[int] = []
        if not self.protect.armed:
            return None
        with self.protect.region:
            rest = without_samples(step, incident)
        if rest is not None:
            return self._commit_only(rest, range(len(rest.micro_batches)), incident, result)
        count = len(step.micro_batches)
        if count == 1:
            return None
        with self.protect.part("good micro-batches"):
            good = good_micro_batches(step)
        if not good or len(good) == count:
            return None
        bad = [index for index in range(count) if index not in good]
        told = with_left_out(incident, micro_batch_words(bad, count))
        return self._commit_only(step, good, told, result)

    def _commit_only(
        self, step: Step, only: Sequence[int], incident: Incident, result: StepResult | None
    ) -> StepResult | None:
        """Update from these micro-batches, renormalised by how many are left."""
        context = self.context
        hold_scaler(context)  # it has unscaled this step once already
        losses = self.forward_backward(step, only=only)
        if len(only) < len(step.micro_batches):
            scale_gradients(context.parameters, len(step.micro_batches) / len(only))
        pending = self._issue(losses)
        reading = self._read(pending) if pending is not None else None
        if pending is None or reading is None:
            return None
        reading, verdict = self.transaction.assess(step, reading)
        if verdict.bad or verdict.kind == "scale_calibration":
            context.put_back()
            return None
        return self._commit(step, pending, reading, incident, result)

    # --- fused optimizers -----------------------------------------------------------------------

    def _update_fused(self, step: Step, pending: Pending) -> StepResult:
        """The kernel takes the verdict from the device; the host reads it one step later."""
        context = self.context
        several = context.agreement.size > 1
        result = StepResult(settle=self._show_numbers if several else self.settle)
        fused = FusedUpdate(context, step, pending, result)
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(context.parameters, context.config.clip_norm, pending.norm)
        self.looks.before_update()
        fused.update(context)
        if self.protect.armed:
            with self.protect.region:
                fused.issued(context)
        self._fused = fused
        self.after_update()
        context.step += 1
        return result

    def _show_numbers(self) -> None:
        """Fill in the result of a fused step. The other ranks may not be asking for theirs, so
        what all ranks do about a bad step waits for the next one.
        """
        fused = self._fused
        if fused is None:
            return
        reading = fused.read(self.transaction)
        vetoed = fused.vetoed(reading) if reading is not None else bool(fused.flag)
        fused.result.resolve(reading, committed=not vetoed)

    def waits_for_ranks(self) -> bool:
        """Was the last step refused by the device, and have the ranks not dealt with it yet?"""
        return self._fused is not None and self._fused.waits_for_ranks(self.transaction)

    def settle(self) -> None:
        """Read a fused step whose verdict is still on the device."""
        fused = self._fused
        self._fused = None
        if fused is None:
            return
        reading = fused.read(self.transaction)
        if reading is None:
            committed = not bool(fused.flag)
            fused.result.resolve(None, committed=committed)
            if committed:
                self.step_end.committed(fused.step, None)
            return
        reading, verdict = self.transaction.assess(fused.step, reading)
        self.transaction.note(reading, verdict)
        self._finish_fused(fused, reading, verdict)

    def _finish_fused(self, fused: FusedUpdate, reading: Reading, verdict: Verdict) -> None:
        vetoed = fused.vetoed(reading)
        if vetoed:
            fused.take_back(self.context, calibrating=verdict.kind == "scale_calibration")
        if not verdict.bad:
            fused.result.resolve(reading, committed=not vetoed)
            self._end(fused.step, reading, committed=not vetoed)
            return
        incident = self.transaction.respond(
            fused.step, reading, verdict, None, committed=not vetoed
        )
        committed = not vetoed and not rewinds(incident)
        fused.result.resolve(reading, committed=committed, incident=incident)
        if vetoed and leaves_out(incident):
            assert incident is not None
            end = capture_rng()
            partial = self._commit_the_rest(fused.step, incident, fused.result)
            restore_rng(end)
            if partial is not None:
                return
        self._end(fused.step, reading, committed=not vetoed, incident=incident)
        incident = self.transaction.conclude(skipped_after_all(incident))
        committed = not vetoed and not rewinds(incident)
        fused.result.resolve(reading, committed=committed, incident=incident)
        second = run_again(self, fused.step, incident, late=True)
        if second is not None:
            fused.result.take_over(second)
