"""`guard.step`: the guard runs the step, so it can replay it exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.drivers.scaler import (
    RISKY,
    UpdateCheck,
    hold_scaler,
    present_scale,
    restore_scaler,
    scaled,
    scaler_copy,
    step_without_gradients,
    unscale,
    update_scaler,
    update_through_wrapper,
    voting_manager,
)
from stepguard.engine.drivers.schedule import (
    ScheduleCopy,
    evaluates_again,
    found_inf,
    takes_found_inf,
)
from stepguard.engine.incident.exceptions import Exceptions
from stepguard.engine.incident.run_facts import (
    leaves_out,
    let_through,
    rewinds,
    skipped_after_all,
    without_micro_batches,
)
from stepguard.engine.incident.situation import Find
from stepguard.engine.protect import Protection
from stepguard.engine.reader import MicroLoss, Pending, micro_loss, own_norm
from stepguard.engine.recover.rewind import (
    Rewinder,
    good_micro_batches,
    run_again,
    without_samples,
)
from stepguard.engine.result import StepResult
from stepguard.engine.transaction import Transaction
from stepguard.records import Incident, Reading
from stepguard.records.incident import OK, Verdict
from stepguard.sentinel.gradients import (
    GradientMark,
    clip,
    risky_update,
    scale_gradients,
)
from stepguard.state.batch import LossFn, Step
from stepguard.state.buffers import UndoCopy
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.tensors.torch_private import check_scaled_gradients

# --- Fused optimizers: the device vetoes through `found_inf`, the host reads it one step later.


def read_later(context: Context) -> bool:
    """Is this update read one step later? Outliers must be known before the update."""
    if not takes_found_inf(context.optimizer) or voting_manager(context.outer) is not None:
        return False
    # where a scaler has set its own flag, the kernel decides in any case
    return context.memory.outliers is None or found_inf(context.optimizer) is not None


def leaves_unscaling(context: Context) -> bool:
    """Does the kernel divide the gradients by the scale, as where a scaler calls the optimizer?

    Not where they are clipped before: a loop has to unscale them for that.
    """
    if context.scaler is None or not context.scaling() or context.config.clip_norm is not None:
        return False
    return read_later(context) and context.outer is None and not context.sharded


@contextmanager
def kernel_unscales(context: Context) -> Iterator[None]:
    """Give the kernel the scale that the gradients carry: it is to divide by it."""
    assert context.scaler is not None
    check_scaled_gradients(context.scaler, context.optimizer)
    context.optimizer.grad_scale = present_scale(context)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del context.optimizer.grad_scale  # type: ignore[attr-defined]


class FusedUpdate:
    """An update that has been issued and whose verdict is not read yet."""

    def __init__(self, context: Context, step: Step, pending: Pending, result: StepResult) -> None:
        self.step = step
        self.pending = pending
        self.result = result
        self.flag = pending.suspect()
        """On the device: not 0 where the kernel leaves everything alone."""
        if not all(map(math.isfinite, pending.lr)):
            self.flag.fill_(1.0)
        self._schedule: ScheduleCopy | None = None
        if context.scheduler is not None:
            self._schedule = ScheduleCopy(context.scheduler, context.optimizer)
        self._scaler = scaler_copy(context)
        self._without_state: list[Tensor] = []
        state = context.optimizer.state
        if len(state) < len(context.memory.ordered):
            self._without_state = [p for p in context.memory.ordered if p not in state]
        self._gradients: GradientMark | None = None
        self._reading: Reading | None = None
        """The numbers, once they have been waited for."""

    def issued(self, context: Context) -> None:
        """The update is on its way; from now on the loop may drop the gradients."""
        self._gradients = GradientMark(context.memory.ordered)

    def read(self, transaction: Transaction) -> Reading | None:
        """Wait for the numbers of this update; None where the guard is disarmed."""
        if not transaction.protect.armed:
            return None
        if self._reading is not None:
            return self._reading
        try:
            gone = self._gradients is not None and self._gradients.gone()
            self.step.grads_gone |= gone
            reading = transaction.read(self.pending, grads_gone=gone)
            self.step.scale = reading.scale or transaction.context.scales.static
            self._reading = reading
        except Exception as fault:
            transaction.protect.failed(fault)
        return self._reading

    def vetoed(self, reading: Reading) -> bool:
        """Did the device leave the parameters alone? The test of `Pending.suspect`, on the host."""
        if self.pending.overflow_passes and reading.loss_overflow:
            return False
        if reading.alarm or reading.bad_state or not all(map(math.isfinite, reading.lr)):
            return True
        seen = (reading.loss, reading.grad_norm, *reading.micro_losses)
        for value in (*seen, *reading.components.values()):
            if value is not None and not math.isfinite(value):
                return True
        return False

    def take_back(self, context: Context, *, calibrating: bool, schedule: bool = True) -> None:
        """Undo what the host did on the assumption that the update would go through."""
        if self._schedule is not None and schedule:
            self._schedule.restore()
        for parameter in self._without_state:
            # the kernel changed nothing, but the optimizer made state for it
            context.optimizer.state.pop(parameter, None)
        if not calibrating:
            self.step.buffers.restore()
            context.memory.attached.restore()
            restore_scaler(context, self._scaler)


# --- What a step goes through, under every driver.


SNAPSHOTS = "snapshots and checkpoints"
ANCHOR_EVERY = 16
"""Committed steps between two remembered healthy batches."""


class Lifecycle:
    """The moments of one optimizer step that are the same for `guard.step` and for `watch`."""

    def __init__(
        self,
        context: Context,
        protect: Protection,
        rewinder: Rewinder,
        find: Find | None = None,
        *,
        reruns: bool = True,
    ) -> None:
        """`find` locates the origin of a bad step. `reruns`: the guard runs the steps itself."""
        self.context = context
        self.protect = protect
        self.rewinder = rewinder
        self.transaction = Transaction(context, protect, rewinder, find, reruns=reruns)
        self.reader = self.transaction.reader
        self.looks = context.hooks.probe
        self.exceptions = Exceptions(context, protect, self.transaction)
        self.commits = 0
        """Updates that went through."""
        self._fused: FusedUpdate | None = None
        """An update whose verdict is still on the device."""

    def read(self, pending: Pending) -> Reading | None:
        """Wait for the numbers of the step; None where the guard is disarmed."""
        if self.protect.armed:
            try:
                return self.transaction.read(pending)
            except Exception as fault:
                self.protect.failed(fault)
        return None

    def scan_update(self, fused: FusedUpdate | None = None) -> None:
        """An update was made, or issued: test what it has written."""
        if self.protect.armed:
            try:
                self.reader.after_update()
                if fused is not None:
                    fused.issued(self.context)
            except Exception as fault:
                self.protect.failed(fault)

    def end(self, step: Step | None, reading: Reading | None, *, committed: bool) -> None:
        """The update went through, or it did not. `reading` is None where it was not read.

        `step` may be None where nobody asks for it and it cannot be run again.
        """
        context, protect = self.context, self.protect
        if not committed:
            self._end_dropped(reading)
            return
        self.commits += 1
        for hook in context.hooks.updated:
            hook()
        # an infinity that the loss shows is not one that the model has absorbed
        self.looks.finish(committed=reading is None or not reading.loss_overflow)
        if reading is None or not protect.armed:
            return
        try:
            add_to_history(context, step, reading)
        except Exception as fault:
            protect.failed(fault)
        if context.hooks.committed and step is not None:
            with protect.part("comparison of the ranks"):
                for tell in context.hooks.committed:
                    tell(step)
        self.looks.committed(reading)
        try:
            context.outputs.step(reading, committed=True)
        except Exception as fault:
            protect.failed(fault, "journal")
        try:
            self.rewinder.probation.commit(reading.step + 1)
            for wait in tuple(self.rewinder.after_commit):
                wait(reading.step + 1)
        except Exception as fault:
            protect.failed(fault, "snapshots")

    def _end_dropped(self, reading: Reading | None) -> None:
        self.looks.finish(committed=False)
        if reading is None or not self.protect.armed:
            return
        if reading.overflow:
            self.looks.skipped(reading)
            self.context.scales.overflows_in_a_row += 1
        with self.protect.part("journal"):
            self.context.outputs.step(reading, committed=False)

    def check_of_update(self, reading: Reading, *, at_risk: bool) -> UpdateCheck | None:
        """Report outliers where that is asked for, and copy what a risky update may touch.

        None for an update that is not risky. `at_risk`: it is so on some rank, and all of them
        know.
        """
        context, protect = self.context, self.protect
        if not protect.armed and not at_risk:
            return None
        if context.memory.outliers is not None:
            with protect.part("outliers"):
                words = context.memory.outliers.words()
                if words:
                    context.outputs.note("outlier", words)
        risky = False
        try:
            # a rate that is the highest so far has not jumped: no need to look for what is known
            ceiling = None if reading.lr == context.history.top_lr else context.lr_ceiling
            risky = risky_update(context.optimizer, ceiling, reading.least_norm)
        except Exception as fault:
            protect.failed(fault, RISKY)
        if not risky and not at_risk:
            return None
        check = UpdateCheck(context, protect, at_risk=at_risk)
        check.copy_everything()
        return check

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
            committed = not bool(fused.flag)
            fused.result.resolve(None, committed=committed)
            self.end(fused.step, None, committed=committed)
            return False
        verdict = OK
        if not self.transaction.passes(reading):
            reading, verdict = self.transaction.assess(fused.step, reading)
            self.transaction.note(reading, verdict)
        return self._finish_fused(fused, reading, verdict, inside=inside)

    def _finish_fused(
        self, fused: FusedUpdate, reading: Reading, verdict: Verdict, *, inside: bool
    ) -> bool:
        """Commit it or take it back, and respond where it was bad."""
        raise NotImplementedError

    def waits_for_ranks(self) -> bool:
        """Was the last step refused by the device, and have the ranks not dealt with it yet?"""
        fused = self._fused
        if fused is None or self.context.agreement.size == 1:
            return False
        reading = fused.read(self.transaction)
        return reading is not None and fused.vetoed(reading)

    def run_ended(self, error: BaseException | None) -> None:
        """Nothing more will come. A run that an error cut short says little about its loop."""
        if error is None:
            self.looks.run_ended()


def add_to_history(context: Context, step: Step | None, reading: Reading) -> None:
    """Learn from a healthy step what this run looks like."""
    context.history.add(reading)
    context.scales.overflows_in_a_row = 0
    if reading.scale is not None:
        context.scales.worked = max(reading.scale, context.scales.worked or 0.0)
    context.budget = context.budget.committed()
    memory = context.memory
    if memory.outliers is not None:
        memory.outliers.committed()
    # Remember a healthy step now and then, so that its batch can be tried on later weights.
    done = context.history.committed
    if step is None:
        return
    if done < ANCHOR_EVERY or done % ANCHOR_EVERY == 1 or memory.anchor is None:
        loss = reading.judged_loss
        if step.replayable and loss is not None and math.isfinite(loss):
            memory.anchor = (step, loss)


class UpdateNotMade:
    """An update that nobody has called yet: only what the forward pass moved is put back."""

    def __init__(self, put_back: Callable[[], object]) -> None:
        self.restore_buffers = put_back

    def stop(self) -> None:
        """Nothing to stop."""


# --- The plain update of a disarmed guard: what the user's own loop would do.


def unguarded_update(context: Context) -> StepResult:
    """Clip and update, unless ranks that are still armed refuse the step."""
    # Armed ranks measure before they exchange what they saw: the same order of collectives.
    # Measure sharded gradients that are to be clipped, unless that was done before the fault.
    if not context.sharded or context.config.clip_norm is None:
        norm = None
    elif (
        context.memory.norm_of_ranks is not None and context.memory.norm_of_ranks[0] == context.step
    ):
        norm = context.memory.norm_of_ranks[1]
    else:
        norm = own_norm(context)
    if context.agreement.stay(context.step, context.parameters) and not context.scaling():
        step_without_gradients(context)
        context.step += 1
        return StepResult().resolve(None, committed=False)  # a scaler would refuse by itself
    if context.config.clip_norm is not None and norm is not None:
        clip(context.parameters, context.config.clip_norm, norm)
    elif context.config.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(context.parameters, context.config.clip_norm)
    # Did the optimizer really step?
    if context.scaler is None or not context.scaling():
        context.stepped.step()
        committed = True
    else:
        before = context.scaler.get_scale()
        context.scaler.step(context.optimizer)
        context.scaler.update()
        # a scaler lowers its scale exactly when it has refused the step
        committed = context.scaler.get_scale() >= before
    context.step += 1
    if committed:
        context.advance_schedule()
        for hook in context.hooks.updated:
            hook()
    return StepResult().resolve(None, committed=committed)


# --- `guard.step`: the guard runs the step, so it can replay it exactly.


class StepDriver(Lifecycle):
    """One optimizer step from zero_grad to scheduler.step, with the transaction in between."""

    def __init__(self, context: Context, protect: Protection, rewinder: Rewinder) -> None:
        super().__init__(context, protect, rewinder)
        self.not_called = UpdateNotMade(context.put_back)

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """One step under protection."""
        context = self.context
        if self._fused is not None:
            self.settle()
        step = self.begin(loss_fn, micro_batches)
        if not self.protect.armed:
            self.forward_backward(step)
            return unguarded_update(context)
        self.looks.begin()
        if self.looks.active:
            self.looks.saw_batch(micro_batches)
        try:
            losses = self.forward_backward(step)
        except BaseException as error:
            self.looks.close()
            incident = None
            if isinstance(error, Exception):
                incident = self.exceptions.in_step(step, error)
            if incident is None:
                raise
            return self.without_step(incident)
        if self.looks.active:
            self.looks.gradients_ready()
        pending: Pending | None = None
        if context.scaler is not None and leaves_unscaling(context):
            with kernel_unscales(context):
                pending = self._issue(losses)
                if pending is not None:
                    return self._update_on_device(step, pending)
        else:
            pending = self._issue(losses)
        if pending is None:
            return unguarded_update(context)
        if pending.fused and read_later(context):
            return self._update_on_device(step, pending)
        return self._judge_and_update(step, pending)

    def _judge_and_update(self, step: Step, pending: Pending) -> StepResult:
        """Read, agree and judge; then commit or refuse."""
        reading = self.read(pending)
        if reading is None:
            return unguarded_update(self.context)
        step.scale = reading.scale or 1.0
        if not self.transaction.passes(reading):
            reading, verdict = self.transaction.assess(step, reading)
            self.transaction.note(reading, verdict)
            if verdict.bad:
                return self._refuse(step, pending, reading, verdict)
            if verdict.kind == "scale_calibration":
                # a loop would have clipped before its scaler refused the update
                self._clip(pending, reading)
                update_scaler(self.context)
                self._end(step, reading, committed=False)
                return StepResult().resolve(reading, committed=False)
        return self._commit(step, pending, reading)

    def _update_on_device(self, step: Step, pending: Pending) -> StepResult:
        """The kernel takes the verdict from the device; the host reads it one step later."""
        context = self.context
        several = context.agreement.size > 1
        result = StepResult(settle=self._show_numbers if several else self.settle)
        fused = FusedUpdate(context, step, pending, result)
        if self.looks.audits:
            self.looks.audit(step)
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(context.parameters, context.config.clip_norm, pending.norm)
        if self.looks.active:
            self.looks.before_update()
        context.optimizer.found_inf = fused.flag  # type: ignore[attr-defined]
        try:
            context.stepped.step()
        finally:
            del context.optimizer.found_inf  # type: ignore[attr-defined]
        self._fused = fused
        self.after_update(fused)
        context.step += 1
        return result

    def between(self) -> None:
        """The loop is between two steps; a snapshot needs the last one read."""
        if self.rewinder.snapshots.due():
            self.settle()
        self.rewinder.snapshots.between_steps()

    # --- around the user's code -----------------------------------------------------------------

    def begin(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> Step:
        """Remember what the step starts from, unless the guard is disarmed."""
        context = self.context
        if self.protect.armed:
            try:
                self.rewinder.snapshots.between_steps()
            except Exception as fault:
                self.protect.failed(fault, SNAPSHOTS)
            try:
                context.remember()
                self.reader.start()
            except Exception as fault:
                self.protect.failed(fault)
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

    def forward_backward(self, step: Step, only: Sequence[int] | None = None) -> list[MicroLoss]:
        """Run the user's code; with `only`, some micro-batches with the random numbers they had."""
        context = self.context
        assert step.loss_fn is not None
        armed = self.protect.armed
        scales = context.scaler is not None or context.scales.static != 1.0
        context.stepped.zero_grad(set_to_none=True)
        losses = []
        for index in range(len(step.micro_batches)) if only is None else only:
            batch = step.micro_batches[index]
            if only is not None:
                restore_rng(step.rng[index])
            elif armed:
                step.rng.append(capture_rng())
            loss, seen = micro_loss(step.loss_fn(batch), batch, context)
            losses.append(seen)
            # Before backward, whose exchange of gradients tells other ranks of a bad loss.
            if context.agreement.size > 1 and self.protect.armed:
                with self.protect.region, self.looks.paused():
                    self.reader.announce(seen.total, summed_in_half=seen.summed_in_half)
            if armed and self.looks.active:
                self.looks.loss_seen(loss)
            torch.autograd.backward(scaled(context, loss) if scales else loss)
        if scales and (only is not None or not leaves_unscaling(context)):
            unscale(context)
        return losses

    def _issue(self, losses: list[MicroLoss]) -> Pending | None:
        if self.protect.armed:
            try:
                return self.reader.issue(losses)
            except Exception as fault:
                self.protect.failed(fault)
        return None

    def without_step(self, incident: Incident) -> StepResult:
        """The policy goes on after an exception, without this step."""
        self._end_dropped(incident.reading)
        self.context.step += 1
        return StepResult().resolve(incident.reading, committed=False, incident=incident)

    def _without_update(
        self, step: Step, reading: Reading, incident: Incident | None
    ) -> StepResult:
        """Conclude a step that was put back, and run it again where that was decided."""
        self._end_dropped(reading)
        self.context.step += 1
        incident = self.transaction.conclude(incident)
        second = run_again(self, step, incident)
        if second is not None:
            return second
        return StepResult().resolve(reading, committed=False, incident=incident)

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
        # Leave buffers, scaler and schedule as if this batch had never come.
        self.context.put_back()
        hold_scaler(self.context)
        step_without_gradients(self.context)
        return self._without_update(step, reading, incident)

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
        check = self.check_of_update(reading, at_risk=pending.at_risk)
        if self.looks.audits and incident is None:
            self.looks.audit(step)
        self._clip(pending, reading)
        if self.looks.active:
            self.looks.before_update()
        if context.outer is None:
            context.optimizer.step()
        elif not update_through_wrapper(context):
            # A wrapper around the optimizer has refused a step that is good here
            self.context.put_back()
            hold_scaler(self.context)
            self._end(step, reading, committed=False)
            return StepResult().resolve(reading, committed=False)
        undone = check.undone(reading) if check is not None else None
        if undone is not None:
            reading, verdict = self.transaction.assess(step, undone)
            return self._refuse(step, pending, reading, verdict)
        self.after_update()
        self._end(step, reading, committed=True, incident=incident)
        if incident is not None:
            incident = self.transaction.conclude(incident)
        return (result or StepResult()).resolve(reading, committed=True, incident=incident)

    def _clip(self, pending: Pending, reading: Reading) -> None:
        context = self.context
        if context.config.clip_norm is not None and pending.norm is not None:
            parameters = context.memory.ordered
            clip(parameters, context.config.clip_norm, pending.norm, known=reading.grad_norm)

    def after_update(self, fused: FusedUpdate | None = None) -> None:
        """An update really happened: scaler and schedule advance."""
        context = self.context
        self.scan_update(fused)
        if context.scaler is not None:
            update_scaler(context)
        if context.scheduler is not None:
            context.advance_schedule()

    def _end(
        self, step: Step, reading: Reading, *, committed: bool, incident: Incident | None = None
    ) -> None:
        self.end(step, reading, committed=committed)
        if self.protect.armed:
            try:
                # Keep what went as it should, to run it again; what a bad step left behind cannot
                # be.
                if incident is None:
                    self.rewinder.snapshots.keep(step, reading.loss, reading.lr)
                elif committed:
                    self.rewinder.snapshots.kept.broken(step.index)
            except Exception as fault:
                self.protect.failed(fault, "steps kept for repetition")
        if step.index == self.context.step:
            self.context.step += 1

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
        told = without_micro_batches(incident, bad, count)
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
        reading = self.read(pending) if pending is not None else None
        if pending is None or reading is None:
            return None
        reading, verdict = self.transaction.assess(step, reading)
        if verdict.bad or verdict.kind == "scale_calibration":
            context.put_back()
            return None
        return self._commit(step, pending, reading, incident, result)

    # --- fused optimizers -----------------------------------------------------------------------

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

    def _finish_fused(
        self, fused: FusedUpdate, reading: Reading, verdict: Verdict, *, inside: bool
    ) -> bool:
        vetoed = fused.vetoed(reading)
        if vetoed:
            fused.take_back(self.context, calibrating=verdict.kind == "scale_calibration")
        if not verdict.bad:
            fused.result.resolve(reading, committed=not vetoed)
            self._end(fused.step, reading, committed=not vetoed)
            return vetoed
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
                return vetoed
        self._end(fused.step, reading, committed=not vetoed, incident=incident)
        incident = self.transaction.conclude(skipped_after_all(incident))
        committed = not vetoed and not rewinds(incident)
        fused.result.resolve(reading, committed=committed, incident=incident)
        second = run_again(self, fused.step, incident, late=True)
        if second is not None:
            fused.result.take_over(second)
        return vetoed


# --- Optimizers that call the loss several times a step (LBFGS, SAM).


class ClosureDriver(StepDriver):
    """`guard.step` for LBFGS, and for SAM, whose first gradients come before its closure."""

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """One step, whose loss the optimizer may evaluate several times."""
        context = self.context
        step = self.begin(loss_fn, micro_batches)
        armed = self.protect.armed
        if armed:
            step.began = capture_rng()
        evaluations = Evaluations(self, step)
        undo: UndoCopy | None = None
        try:
            if evaluates_again(context.optimizer):
                evaluations.evaluate()
            if not evaluations.vetoed:
                undo = UndoCopy(context.optimizer) if armed else None
                context.optimizer.step(evaluations.evaluate)
        except Exception as error:
            if not armed:
                raise
            if undo is not None:
                undo.restore()  # a line search may have moved the weights already
            incident = self.exceptions.in_step(step, error)
            if incident is None:
                raise
            return self.without_step(incident)
        reading = evaluations.first
        if evaluations.vetoed and reading is not None:
            return self._undone(step, undo, evaluations, reading)
        self.after_update()
        if reading is not None:
            self._end(step, reading, committed=True)
        if step.index == context.step:
            context.step += 1
        return StepResult().resolve(reading, committed=True)

    def _undone(
        self, step: Step, undo: UndoCopy | None, evaluations: Evaluations, reading: Reading
    ) -> StepResult:
        """Put everything back as it was before a step with a bad evaluation."""
        unknown = undo.restore() if undo is not None else ()
        if unknown:
            names = ", ".join(unknown)
            self.context.outputs.note(
                "veto", f"the update was vetoed, but {names} cannot be compared"
            )
        self.context.buffers.restore()
        for parameter, gradient in evaluations.bad_gradients:
            parameter.grad = gradient
        return self._without_update(step, reading, skipped_after_all(evaluations.incident))


class Evaluations:
    """The evaluations of one step. After a bad one the rest are cut short by zero gradients."""

    def __init__(self, driver: StepDriver, step: Step) -> None:
        self._driver = driver
        self._step = step
        self.first: Reading | None = None
        self.incident: Incident | None = None
        self.vetoed = False
        self.bad_gradients: list[tuple[Tensor, Tensor | None]] = []
        self._last: Tensor | None = None

    def evaluate(self) -> Any:
        """Run forward and backward, and read what they leave: what the optimizer calls."""
        if self.vetoed and self._last is not None:
            return self._last
        self._step.rng.clear()
        losses = self._driver.forward_backward(self._step)
        totals = [m.total.reshape(()) for m in losses]
        self._last = sum(totals[1:], start=totals[0])  # in order, as a loop adds them
        if self._driver.protect.armed:
            with self._driver.protect.region:
                self._read(losses)
        return self._last

    def _read(self, losses: list[MicroLoss]) -> None:
        """Read, agree and judge one evaluation."""
        context = self._driver.context
        transaction = self._driver.transaction
        pending = transaction.reader.issue(losses)
        reading, verdict = transaction.assess(self._step, transaction.read(pending))
        if self.first is not None and verdict.finite_anomaly:
            verdict = OK  # along a line search losses say nothing about the run
        self.first = self.first or reading
        if verdict.bad:
            update = UpdateNotMade(self._step.buffers.restore)
            incident = transaction.respond(self._step, reading, verdict, update)
            if not let_through(verdict, incident):
                self.incident = incident
                self.first = reading
                self.vetoed = True
                # gradients of zero end a line search at once
                for parameter in context.parameters:
                    self.bad_gradients.append((parameter, parameter.grad))
                    parameter.grad = torch.zeros_like(parameter)
                return
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(
                context.parameters, context.config.clip_norm, pending.norm, known=reading.grad_norm
            )
