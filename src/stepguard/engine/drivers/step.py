"""`guard.step`: the guard runs the step, so it can replay it exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepguard.engine import step_end
from stepguard.engine.context import Context
from stepguard.engine.drivers.fused import LateUpdate, read_later
from stepguard.engine.incident.closer_look import born_in_update
from stepguard.engine.incident.exceptions import Exceptions
from stepguard.engine.incident.outlier_step import keep_out_outliers
from stepguard.engine.incident.presumed_verdict import assess_or_presume
from stepguard.engine.protect import Shield
from stepguard.engine.reader import MicroLoss, Pending, Reader, micro_loss
from stepguard.engine.recover.partial_step import (
    good_micro_batches,
    micro_batch_words,
    without_samples,
)
from stepguard.engine.recover.rerun import run_again
from stepguard.engine.recover.rewind import Recovery
from stepguard.engine.result import StepResult
from stepguard.engine.transaction import FINITE_KINDS, Pipeline, let_through
from stepguard.records import Incident, Reading
from stepguard.records.verdict import Verdict
from stepguard.sentinel.gradients import clip, gradient_norm, scale_gradients
from stepguard.sentinel.risky_update import risky_update
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.step import LossFn, Step
from stepguard.state.undo import UndoCopy


class Stepper:
    """One optimizer step from zero_grad to scheduler.step, with the guard's parts in between."""

    def __init__(self, context: Context, shield: Shield, recovery: Recovery) -> None:
        self.context, self.shield, self.recovery = context, shield, recovery
        self.pipeline, self.reader = Pipeline(context, recovery), Reader(context)
        self.assess = partial(assess_or_presume, context, shield, self.pipeline.assess)
        recovery.after_rewind.append(self.reader.rewound)
        self.exceptions = Exceptions(context, shield, self.pipeline)
        self._late: LateUpdate | None = None

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        self.settle()
        step = self.shield.call(None, self.begin, loss_fn, micro_batches)
        if step is None:
            return self._unguarded(loss_fn, micro_batches)
        try:
            losses = self.forward_backward(step)
        except Exception as error:
            incident = self.exceptions.in_step(step, error)
            if incident is None:
                raise
            return self.left_out(incident)
        pending = self.shield.call(None, self.reader.issue, losses)
        if pending is None:
            return self._update_unguarded()
        if read_later(self.context):
            return self._update_late(step, pending)
        return self._update_now(step, pending)

    def left_out(self, incident: Incident) -> StepResult:
        """The policy goes on after an exception, without this step."""
        self.shield.spare(
            None, step_end.recorded, self.context, incident.reading, went_through=False
        )
        self.context.step += 1
        return StepResult().resolve(incident.reading, committed=False, incident=incident)

    def between(self) -> None:
        """The loop is between two steps; what is to be done there needs the last one read."""
        if self.recovery.due():
            self.settle()
        self.recovery.between()

    def begin(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> Step:
        """Remember what the step starts from."""
        context = self.context
        self.shield.spare(None, self.recovery.between)
        context.buffers.remember()
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
        )

    def forward_backward(self, step: Step, only: Sequence[int] | None = None) -> list[MicroLoss]:
        """The user's code. With `only`, some micro-batches again with the random numbers they had."""
        context = self.context
        context.optimizer.zero_grad(set_to_none=True)
        losses = []
        for index, batch in enumerate(step.micro_batches):
            if only is None:
                step.rng.append(capture_rng())
            elif index not in only:
                continue
            else:
                restore_rng(step.rng[index])
            assert step.loss_fn is not None
            loss, seen = micro_loss(step.loss_fn(batch), batch, context)
            losses.append(seen)
            self.shield.call(None, self.reader.announce, seen.total)
            torch.autograd.backward(self._scaled(loss))
        self._unscale()
        return losses

    def settle(self) -> None:
        """Read a step whose verdict was still on the device."""
        late, self._late = self._late, None
        if late is None:
            return
        reading = self.shield.call(None, late.read, self.reader)
        if reading is None:
            went_through = not bool(late.flag)
            late.result.resolve(None, committed=went_through)
            if went_through:
                self._run_commit_hooks()
            return
        late.step.scale = reading.scale or self.context.loss_scale
        reading, verdict = self.assess(late.step, reading)
        self._finish_late(late, reading, verdict)

    def _finish_late(self, late: LateUpdate, reading: Reading, verdict: Verdict) -> None:
        context, vetoed = self.context, late.vetoed(reading)
        if vetoed:
            late.take_back(context, calibrating=verdict.kind == "scale_calibration")
        if verdict.severity == "note":
            self.shield.spare(None, self.pipeline.note, reading, verdict)
        if not verdict.bad:
            late.result.resolve(reading, committed=not vetoed)
            self._after(late.step, reading, went_through=not vetoed)
            return
        incident = self.shield.call(
            None, self.pipeline.respond, late.step, reading, verdict, committed=not vetoed
        )
        late.result.resolve(reading, committed=not (vetoed or rewinds(incident)), incident=incident)
        if vetoed and self._went_on_without(late, incident):
            return
        self._after(late.step, reading, went_through=not vetoed, incident=incident)
        if incident is not None:
            decided = skipped_after_all(incident)
            incident = self.shield.call(decided, step_end.apply, context, self.recovery, decided)
            late.result.resolve(
                reading, committed=not (vetoed or rewinds(incident)), incident=incident
            )
            again = run_again(self, late.step, incident, late=True)
            if again is not None:
                late.result.take_over(again)

    def _went_on_without(self, late: LateUpdate, incident: Incident | None) -> bool:
        """The good part of a step that the device refused, one step late."""
        if incident is None or not leaves_out(incident):
            return False
        end = capture_rng()
        partial = self._from_the_rest(late.step, incident, late.result)
        restore_rng(end)
        return partial is not None

    def _update_now(self, step: Step, pending: Pending) -> StepResult:
        reading = self.shield.call(None, self.reader.complete, pending)
        if reading is None:
            return self._update_unguarded()
        step.scale = reading.scale or 1.0
        reading, verdict = self.assess(step, reading)
        if verdict.severity == "note":
            self.shield.spare(None, self.pipeline.note, reading, verdict)
        if verdict.bad:
            return self._refused(step, pending, reading, verdict)
        if verdict.kind == "scale_calibration":
            self._scaler_update()
            self._after(step, reading, went_through=False)
            return StepResult().resolve(reading, committed=False)
        return self._commit(step, pending, reading)

    def _commit(
        self,
        step: Step,
        pending: Pending,
        reading: Reading,
        incident: Incident | None = None,
        result: StepResult | None = None,
    ) -> StepResult:
        context, result = self.context, result or StepResult()
        give_back = self.shield.spare(None, keep_out_outliers, context)
        norm, known = pending.norm, reading.grad_norm
        if give_back is not None:
            norm, known = (
                gradient_norm([p.grad for p in context.parameters if p.grad is not None]),
                None,
            )
        if context.config.clip_norm is not None and norm is not None:
            clip(context.parameters, context.config.clip_norm, norm, known=known)
        risky = self.shield.spare(
            False, risky_update, context.optimizer, context.lr_ceiling, reading.least_norm
        )
        undo = self.shield.spare(None, UndoCopy, context.optimizer) if risky else None
        context.optimizer.step()
        if give_back is not None:
            give_back()
        if undo is not None:
            born = self.shield.spare([], born_in_update, context)
            if born:
                undo.restore()
                reading = replace(reading, bad_state=tuple(born), state_born=True)
                reading, verdict = self.assess(step, reading)
                return self._vetoed(step, reading, verdict)
        self.shield.call(None, self.reader.after_update)
        self._advance()
        self._after(step, reading, went_through=True, incident=incident)
        if incident is not None and context.unrecorded is not None:
            incident = self.shield.call(incident, step_end.apply, context, self.recovery, incident)
        return result.resolve(reading, committed=True, incident=incident)

    def _refused(
        self, step: Step, pending: Pending, reading: Reading, verdict: Verdict
    ) -> StepResult:
        """An incident before the update: finite anomalies may be let through, all else is vetoed."""
        if verdict.kind not in FINITE_KINDS:
            return self._vetoed(step, reading, verdict)
        incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
        if let_through(verdict, incident):
            return self._commit(step, pending, reading, incident)
        return self._drop(step, reading, incident)

    def _vetoed(self, step: Step, reading: Reading, verdict: Verdict) -> StepResult:
        """The update does not happen. Buffers are put back before anything else."""
        self.context.buffers.restore()
        end = capture_rng()
        incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
        if incident is not None and leaves_out(incident):
            partial = self._from_the_rest(step, incident)
            restore_rng(end)
            if partial is not None:
                return partial
            incident = skipped_after_all(incident)
        return self._drop(step, reading, incident)

    def _drop(self, step: Step, reading: Reading, incident: Incident | None) -> StepResult:
        """Buffers, scaler and schedule are as if this batch had never come."""
        context = self.context
        context.buffers.restore()
        step_end.hold_scaler(context)
        self.shield.spare(None, step_end.recorded, context, reading, went_through=False)
        context.step += 1
        if incident is not None:
            incident = self.shield.call(incident, step_end.apply, context, self.recovery, incident)
        again = run_again(self, step, incident)
        return again or StepResult().resolve(reading, committed=False, incident=incident)

    def _from_the_rest(
        self, step: Step, incident: Incident, result: StepResult | None = None
    ) -> StepResult | None:
        """Update from what is left without the guilty samples, else without the bad micro-batches;
        None if neither.
        """
        rest = self.shield.call(None, without_samples, step, incident)
        if rest is not None:
            return self._commit_rest(rest, range(len(rest.micro_batches)), incident, result)
        count = len(step.micro_batches)
        if count == 1:
            return None
        good = self.shield.spare([], good_micro_batches, step)
        if not good or len(good) == count:
            return None
        bad = [index for index in range(count) if index not in good]
        return self._commit_rest(
            step, good, left_out(incident, micro_batch_words(bad, count)), result
        )

    def _commit_rest(
        self, step: Step, only: Sequence[int], incident: Incident, result: StepResult | None
    ) -> StepResult | None:
        """The update from these micro-batches, renormalised by how many are left."""
        context = self.context
        step_end.hold_scaler(context)  # it has unscaled this step once already
        losses = self.forward_backward(step, only=only)
        if len(only) < len(step.micro_batches):
            scale_gradients(context.parameters, len(step.micro_batches) / len(only))
        pending = self.shield.call(None, self.reader.issue, losses)
        left = (
            self.shield.call(None, self.reader.complete, pending) if pending is not None else None
        )
        if pending is None or left is None:
            return None
        left, verdict = self.assess(step, left)
        if verdict.bad or verdict.kind == "scale_calibration":
            context.buffers.restore()
            return None
        return self._commit(step, pending, left, incident, result)

    def _update_late(self, step: Step, pending: Pending) -> StepResult:
        """A fused optimizer takes the verdict on the device; the host reads it one step later."""
        context = self.context
        result = StepResult(settle=self.settle)
        late = LateUpdate(context, step, pending, result)
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(context.parameters, context.config.clip_norm, pending.norm)
        late.update(context.optimizer)
        self.shield.call(None, late.issued, context)
        self.shield.call(None, self.reader.after_update)
        self._late = late
        self._scaler_update()
        context.advance_schedule()
        context.step += 1
        return result

    def _advance(self) -> None:
        """After an update that really happened."""
        self._scaler_update()
        self.context.advance_schedule()

    def _after(
        self, step: Step, reading: Reading, *, went_through: bool, incident: Incident | None = None
    ) -> None:
        context = self.context
        if went_through:
            self._run_commit_hooks()
            self.shield.call(None, step_end.committed, context, step, reading)
            self.shield.spare(None, self.recovery.committed, reading.step + 1)
        else:
            self.shield.spare(None, step_end.recorded, context, reading, went_through=False)
        self.shield.spare(None, self._keep, step, reading, went_through, incident)
        if step.index == context.step:
            context.step += 1

    def _keep(
        self, step: Step, reading: Reading, went_through: bool, incident: Incident | None
    ) -> None:
        """What went as it should can be run again; what a bad step left behind cannot."""
        if incident is None:
            self.recovery.keep(step, reading.loss)
        elif went_through:
            self.recovery.window.broken(step.index)

    def _run_commit_hooks(self) -> None:
        for hook in self.context.commit_hooks:
            hook()

    def _scaled(self, loss: Tensor) -> Tensor:
        context = self.context
        if context.scaling() and context.scaler is not None:
            return context.scaler.scale(loss)
        return loss * context.loss_scale if context.loss_scale != 1.0 else loss

    def _unscale(self) -> None:
        context = self.context
        if context.scaling() and context.scaler is not None:
            context.scaler.unscale_(context.optimizer)
        elif context.loss_scale != 1.0:
            scale_gradients(context.parameters, 1.0 / context.loss_scale)

    def _scaler_update(self) -> None:
        if self.context.scaler is not None and self.context.scaling():
            self.context.scaler.update()

    def _unguarded(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """The plain step of a disarmed guard."""
        self.context.optimizer.zero_grad(set_to_none=True)
        for batch in micro_batches:
            loss, _ = micro_loss(loss_fn(batch), batch, self.context)
            torch.autograd.backward(self._scaled(loss))
        self._unscale()
        return self._update_unguarded()

    def _update_unguarded(self) -> StepResult:
        context = self.context
        if context.agreement.stay(context.step, context.parameters) and not context.scaling():
            context.step += 1
            return StepResult().resolve(None, committed=False)  # a scaler would refuse by itself
        if context.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(context.parameters, context.config.clip_norm)
        went_through = True
        if context.scaling() and context.scaler is not None:
            before = context.scaler.get_scale()
            context.scaler.step(context.optimizer)
            context.scaler.update()
            went_through = context.scaler.get_scale() >= before
        else:
            context.optimizer.step()
        context.step += 1
        if went_through:
            context.advance_schedule()
            self._run_commit_hooks()
        return StepResult().resolve(None, committed=went_through)


def rewinds(incident: Incident | None) -> bool:
    return (
        incident is not None
        and incident.decision is not None
        and incident.decision.action == "rewind"
    )


def leaves_out(incident: Incident) -> bool:
    return incident.decision is not None and incident.decision.action == "leave_out"


def left_out(incident: Incident, what: str) -> Incident:
    """The incident with the words for what was really left out."""
    assert incident.decision is not None
    return replace(incident, decision=replace(incident.decision, left_out=what))


def skipped_after_all(incident: Incident) -> Incident:
    """What was to be left out could not be cut out of the step: the whole of it was dropped."""
    if not leaves_out(incident):
        return incident
    assert incident.decision is not None
    return replace(
        incident, decision=replace(incident.decision, action="skip", left_out="the step")
    )
