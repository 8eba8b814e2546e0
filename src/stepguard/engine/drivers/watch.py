"""`watch`: the loop stays as it is, and the guard reads and vetoes inside `optimizer.step()`.

A pre-hook on the optimizer reads the gradients and, if they are bad, hides them, so that the update
has nothing to do; a post-hook gives them back and undoes what the update did all the same. The loss
and the pre-clip norm are observed through patched torch functions (sentinel/torch_patches).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from stepguard.engine.context import Context
from stepguard.engine.drivers.scaler import UpdateCheck, present_scale
from stepguard.engine.drivers.schedule import (
    calls_of_step,
    evaluates_again,
    found_inf,
    inner_optimizer,
    needs_closure,
)
from stepguard.engine.drivers.step import (
    SNAPSHOTS,
    FusedUpdate,
    Lifecycle,
    UpdateNotMade,
    read_later,
)
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.engine.incident.run_facts import let_through
from stepguard.engine.protect import Protection
from stepguard.engine.reader import Pending, count_labels, gradients_of
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.result import StepResult
from stepguard.engine.transaction import VetoedUpdate
from stepguard.engine.watch.live_tracing import LiveTracing, ScheduleRollback
from stepguard.engine.watch.model_calls import MicroBatches, ModelCalls, StepBoundary
from stepguard.engine.watch.observed_loss import GradientVeto, ObservedLoss
from stepguard.engine.watch.shared_backward import SharedBackward, Sharing
from stepguard.engine.wiring import Wiring, owners
from stepguard.judge.judge import alarming
from stepguard.records import Incident, Reading
from stepguard.records.incident import OK, Verdict
from stepguard.sentinel.torch_patches import Update, inside_backward, listen
from stepguard.state.batch import LossFn, Step, total_loss, unwrapped
from stepguard.state.buffers import BufferKeeper

# --- What a watched step is made of, and how it begins and ends.


DROPPED_FOR_ANOTHER = "update dropped: another optimizer of the same backward pass found a bad step"
IN_BACKWARD = (
    "its optimizer steps inside the backward pass: a guard for each parameter would keep "
    "the whole model"
)
NOT_REMEMBERED = (
    "buffers stay as the step left them, because no call of the model was seen to begin it"
)


NO_BUFFERS = BufferKeeper(())
"""Stands in where a forward pass has changed no buffer, so that none has to be put back."""


class WatchDriver(Lifecycle):
    """Optimizer hooks of one guard; also gets the calls of patched torch functions."""

    def __init__(
        self, context: Context, protect: Protection, rewinder: Rewinder, wiring: Wiring
    ) -> None:
        self.tracing = LiveTracing(context)
        super().__init__(context, protect, rewinder, self.tracing.locate, reruns=False)
        self.wiring = wiring
        self.observed = ObservedLoss(context, self.reader.announce)
        self.rollback = ScheduleRollback(context)
        self.model_calls = ModelCalls(
            context.model, protect, self._model_called, self.raised, context.hooks.probe
        )
        self.micro_batches = MicroBatches(self.not_listening)
        self.boundary = StepBoundary(context.roots.values(), self._step_begins)
        self.shared = SharedBackward(self)
        self._listening = True
        self.dropped = False
        """The last update was vetoed, as far as is known by now: a fused one is read later."""
        self._averaged: weakref.WeakKeyDictionary[AveragedModel, int] = weakref.WeakKeyDictionary()
        """Averages of this model -> updates that had gone through when each was last updated."""
        # --- of the step at hand
        self._reading: Reading | None = None
        self._judged: Step | None = None
        """What `_reading` was judged with."""
        self._incident: Incident | None = None
        self._traced = False
        """The live tracer has to be notified of this step."""
        self._start_seen = False
        """A call of the model, or of a part of it, was seen to begin this step."""
        self.vetoing = False
        """This step has been found bad: its update must not happen."""
        self._veto = GradientVeto(context)
        self._check: UpdateCheck | None = None
        self._begun = False
        """The update before this one has been closed."""
        self._remembered = False
        """Buffers are known as they were before this step."""
        self._timeline = 0
        """Rewinds before this step began: older gradients belong to weights that are gone."""
        self._own_flag = False
        """`optimizer.found_inf` was set by the guard, not by the user's scaler."""
        self._not_reached = UpdateNotMade(self.restore_buffers)
        self._dropped_late = False
        """The update is dropped for an optimizer that was refused before this one stepped."""
        self._dropped_for: WatchDriver | None = None
        """Another optimizer of the same backward pass, whose incident drops this update."""
        self._stepping = 0
        """Running calls of `step`: one that calls `super().step()` runs the hooks twice."""
        resources = context.resources
        resources.callback(self.boundary.close)
        resources.callback(self.shared.leave)
        self.remember()
        context.buffers.mark()
        resources.callback(self.model_calls.close)
        resources.callback(listen(self))
        resources.callback(self.tracing.close)
        self._hooks = ExitStack()
        resources.callback(lambda: self._hooks.close())
        self._hook_optimizer()
        wiring.adopt = self.adopt

    # --- a step begins --------------------------------------------------------------------------

    def _model_called(self, arguments: dict[str, Any]) -> None:
        self.boundary.root_called()
        self.context.memory.habits.calls += 1
        if self._traced:
            self.tracing.model_called(arguments)
        if self.looks.active:
            self.looks.saw_batch(arguments)

    def _step_begins(self) -> None:
        """Nothing of the next step has run yet; what the loop did since the update is its own."""
        if LiveTracing.armed is None:
            self._remember_start()
        else:
            with self.tracing.paused():
                self._remember_start()
        self._timeline = self.context.budget.rewinds
        self.looks.begin()

    def _remember_start(self) -> None:
        self._start_seen = True
        self.between()
        norms_ran = self.context.buffers.norms_ran()
        if norms_ran:
            self.boundary.doubt()
        if not self._remembered or not norms_ran:
            self.remember()

    def between(self) -> None:
        """The loop is between two steps; a snapshot needs the last one closed."""
        if not self.protect.armed:
            return
        snapshots = self.rewinder.snapshots
        due = False
        try:
            due = snapshots.due()
        except Exception as fault:
            self.protect.failed(fault, SNAPSHOTS)
        if due:
            self._begin()
            with self.protect.part(SNAPSHOTS):
                snapshots.between_steps()

    def remember(self) -> None:
        """Remember buffers and attributes of modules as they are now."""
        if self.protect.armed:
            try:
                self.context.remember()
            except Exception as fault:
                self.protect.failed(fault)
        self._remembered = self.protect.armed

    def _begin(self) -> None:
        """The loop has come to the next update: close the last one first."""
        if self._begun:
            return
        self._begun = True
        scheduled = self.context.scheduler is not None
        moved: bool | None = None
        if scheduled and self.protect.armed:
            with self.protect.region:
                moved = self.rollback.moved()
        taken_back = False
        if self._fused is not None and LiveTracing.armed is None:
            taken_back = self.settle()
        elif self._fused is not None:
            with self.tracing.paused():
                taken_back = self.settle()
        if scheduled or self.rollback.scaler:
            self._take_back_schedule(None if taken_back else moved)

    def _take_back_schedule(self, moved: bool | None = None) -> None:
        if self.protect.armed:
            with self.protect.region:
                self.rollback.take_back(moved)

    # --- what it is made of ---------------------------------------------------------------------

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """What runs in here is the guard's own, not the next step."""
        before = self._listening
        self._listening = False
        try:
            with self.model_calls.pausing():
                yield
        finally:
            self._listening = before

    def _end_trace(self) -> None:
        """From here on the guard works, not the user."""
        if self.looks.active:
            self.looks.gradients_ready()
        if self._traced or LiveTracing.armed is not None:
            self._traced = True
            self.tracing.pause()
            if self.protect.armed:
                with self.protect.part("live tracing"):
                    self.tracing.finish()

    def _issue(self, sharing: Sequence[Sharing] | None = None) -> Pending | None:
        """Numbers of the gradients, and one for those of `sharing`, optimizers that step from the
        same backward pass; None for an update that is not reached. None where disarmed.
        """
        if not self.protect.armed:
            return None
        try:
            self.reader.start()
            others: Tensor | None = None
            if sharing is not None and (sharing or self.shared.partners):
                others = self.shared.norm_of_others(sharing)
            gradients = gradients_of(self.context)
            norm = self.observed.norm(gradients)
            pending = self.reader.issue(self.observed.losses, norm, others, gradients)
            if sharing is not None:
                self.shared.norm = pending.norm.total if pending.norm is not None else None
            return pending
        except Exception as fault:
            self.protect.failed(fault)
        return None

    def _step(self, reading: Reading | None) -> Step:
        """The step at hand, as far as it can be run again."""
        context = self.context
        step = Step(
            *(context.step, context.model, context.optimizer, context.modules, context.buffers),
            sharded=context.sharded,
        )
        losses = self.observed.losses
        if not losses or losses[0].summed_in_half:
            step.summed_in_half = all(loss.summed_in_half for loss in losses)
        scale = (reading.scale if reading is not None else None) or 1.0
        if self.micro_batches.complete(step, len(self.observed.losses)):
            step.clip_norm = context.config.clip_norm
            step.grads_gone = self.observed.clipped
            step.scale = scale
            return step
        step.model_fn = self.model_calls.model_fn()
        if step.model_fn is None:
            step.scale = scale
            return step
        step.expressions = [loss.expression for loss in self.observed.losses]
        # the gradients of the outputs already carry the loss scale, so the step's own stays 1
        calls = self.model_calls.calls
        batches, lines = [], []
        for call in calls:
            batches.append(call.as_batch())
            step.rng.append(call.rng)
            lines.append(call.line)
        step.micro_batches, step.lines = tuple(batches), tuple(lines)
        return step

    def raised(self, error: BaseException | None) -> None:
        """An exception passes through the model or its backward, and not in a replay."""
        if self._listening:
            self.looks.close()
            with self.tracing.paused(), self.not_listening():
                self.exceptions.in_loop(self._step(None), error)

    def forget(self) -> None:
        """Drop what was observed of a step that is over, or of a repeated evaluation."""
        self.observed.clear()
        self.model_calls.clear()
        self.micro_batches.clear()

    # --- how its update is stopped (transaction.VetoedUpdate) -----------------------------------

    def stop(self) -> None:
        """Hide the gradients from the optimizer."""
        self._veto.hide(self._check.undo if self._check is not None else None)

    def restore_buffers(self) -> str:
        """Put back the buffers; in words where the beginning of the step was not seen."""
        if not self._remembered:
            return NOT_REMEMBERED
        self.context.put_back()
        return ""

    # --- a step ends ----------------------------------------------------------------------------

    def _conclude(self, incident: Incident | None, *, hold: bool) -> None:
        """Apply and record. That may change the schedule, so it is held as it is afterwards."""
        try:
            self.transaction.conclude(incident)
        finally:
            if hold and self.protect.armed:
                with self.protect.region:
                    self.rollback.vetoed()

    def _end_step(self, *, counts: bool = True) -> None:
        """The update is over. `counts`: it was a step of this guard."""
        if counts and not self.vetoing and self.protect.armed:
            try:
                self.observed.update_made()
            except Exception as fault:
                self.protect.failed(fault, "silent failures")
        self._reading = None
        self._judged = None
        self._start_seen = False
        self._incident = None
        self.vetoing = False
        self._check = None
        self._begun = False
        self.forget()
        self.shared.stepped()
        rewinds = self.context.budget.rewinds
        if counts and self._timeline == rewinds:
            self.context.step += 1
        self._timeline = rewinds
        self._remembered = False
        self.context.buffers.mark()
        if not self.boundary.open():
            # then nothing may tell where the next step begins
            self.remember()
        if self._traced or not self.tracing.idle:
            self._traced = not self.tracing.idle
            if self.protect.armed:
                with self.protect.part("live tracing"):
                    self.tracing.begin()

    # --- a fused optimizer: the kernel takes the verdict, the host reads it later ----------------

    def _flag(self, pending: Pending) -> None:
        """Give the kernel the verdict, read it later. The flag of a scaler is kept and joined."""
        try:
            optimizer = self.context.optimizer
            fused = FusedUpdate(self.context, self._step(None), pending, StepResult())
            theirs = found_inf(optimizer)
            if theirs is not None:
                fused.flag = torch.maximum(theirs, fused.flag.to(theirs))
            optimizer.found_inf = fused.flag  # type: ignore[attr-defined]
            self._own_flag = theirs is None
            self._fused = fused
        except Exception as fault:
            self.protect.failed(fault)
        self._audit(None)
        if self.looks.active:
            self.looks.before_update()

    def _audit(self, reading: Reading | None) -> None:
        """Run a healthy step again, where that is asked for and its beginning was seen."""
        if self.looks.audits and self._remembered:
            with self.not_listening():
                self.looks.audit(self._step(reading))

    def _issued(self, fused: FusedUpdate) -> None:
        """A fused update is on its way."""
        self.scan_update(fused)
        try:
            self.dropped = False
            changed = self.context.buffers.changing() or bool(self.context.memory.attached)
            if not self._remembered or changed:
                # changed buffers cannot wait: the next forward needs them put back
                self.dropped = self.settle(inside=True)
            else:
                fused.step.buffers = NO_BUFFERS
        finally:
            self._end_step()

    def _finish_fused(
        self, fused: FusedUpdate, reading: Reading, verdict: Verdict, *, inside: bool
    ) -> bool:
        """True when it was vetoed, and what the loop has done since has been taken back."""
        together = fused.pending.others_bad
        refused = verdict.bad or together
        vetoed = fused.vetoed(reading) or together
        if vetoed:
            # The kernel left everything alone: take back what the host did in the meantime.
            if not refused:
                self.rollback.scaler_skipped()
            else:
                every_step = self.rollback.every_step
                fused.take_back(self.context, calibrating=False, schedule=every_step)
                if self.commits in self._averaged.values():
                    told = (
                        "an AveragedModel averaged the same weights once more after the "
                        "vetoed update"
                    )
                    self.context.outputs.note("veto", told)
        if not verdict.bad:
            self.end(fused.step, reading, committed=not vetoed)
        else:
            incident = self.transaction.respond(
                fused.step, reading, verdict, None, committed=not vetoed
            )
            self.end(fused.step, reading, committed=not vetoed)
            self._conclude(incident, hold=vetoed and inside)
        if together and not verdict.bad:
            self.context.outputs.note("veto", DROPPED_FOR_ANOTHER)
        return vetoed and refused

    # --- the verdict ----------------------------------------------------------------------------

    def check(self, *, again: bool = False) -> None:
        """Read and judge gradients before they are used. `again`: a further evaluation."""
        self._end_trace()
        sharing = [] if again else self.shared.waiting()
        pending = self._issue(sharing)
        if pending is None:
            # ranks that are still armed may refuse the step; a scaler refuses by itself
            refused = self.context.agreement.stay(self.context.step, self.context.parameters)
            if refused and not self.context.scaling():
                self._refuse()
            return
        self.wiring.update(self.reader.missing or 0)
        if pending.fused and read_later(self.context):
            self._flag(pending)
            return
        reading = self.read(pending)
        if reading is None:
            return
        damaged = self._damaged_peer(sharing, reading)
        if damaged is None:
            self._judge(reading, self, again=again)
        if sharing or pending.others_bad:
            self._decide_together(sharing, pending, damaged)
        if not self.vetoing and self._check is None:
            self._check = self.check_of_update(reading, at_risk=pending.at_risk)
            self._audit(reading)
            if self.looks.active:
                self.looks.before_update()

    def _judge(self, reading: Reading, update: VetoedUpdate, *, again: bool = False) -> None:
        """Judge the step, and respond to a bad one."""
        if self.transaction.passes(reading):
            if not again:
                self._reading = reading
                self._judged = None
            return
        step = self._step(reading)
        reading, verdict = self.transaction.assess(step, reading)
        if again and verdict.finite_anomaly:
            verdict = OK  # along a line search losses say nothing about the run
        if not again or verdict.bad:
            self._reading = reading
            self._judged = step
        if verdict is OK:
            return
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
        pending = self._issue()
        reading = self.read(pending) if pending is not None else None
        if reading is not None:
            self._judge(reading, self._not_reached)
        return reading

    def _refuse(self) -> None:
        """Drop an update for no reason of this optimizer's own."""
        self.stop()
        self.vetoing = True

    # --- several optimizers, one backward pass --------------------------------------------------

    def _damaged_peer(self, sharing: list[Sharing], reading: Reading) -> WatchDriver | None:
        """The one whose weights are damaged, where this guard's own are not."""
        if not sharing or not alarming(reading) or not self.protect.armed:
            return None
        with self.protect.region:
            if stored_trouble(self.context):
                return None
            for peer in sharing:
                if isinstance(peer, WatchDriver) and stored_trouble(peer.context):
                    return peer
        return None

    def _decide_together(
        self, sharing: list[Sharing], pending: Pending, damaged: WatchDriver | None
    ) -> None:
        """What one optimizer of a backward pass finds bad is dropped by all."""
        if self.vetoing:
            for peer in sharing:
                peer.shared.drop(counts=True)
            return
        if not pending.others_bad and damaged is None:
            return
        asked = [damaged] if damaged is not None else sharing
        drivers = (peer for peer in asked if isinstance(peer, WatchDriver))
        self._dropped_for = next((driver for driver in drivers if driver.found_bad()), None)
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
        # Undo what moved; in words what cannot be undone. Runs when disarmed, too.
        left = []
        with self.protect.part("undoing a vetoed update"):
            left.append(self._veto.put_back())
        with self.protect.part("buffers before the step"):
            left.append(self.restore_buffers())
        put_back = "; ".join(words for words in left if words)
        # Say in the decision what could not be put back, or on a line of its own.
        if not put_back:
            incident = self._incident
        elif self._incident is None or self._incident.decision is None:
            self.context.outputs.note("veto", f"the update was vetoed, but {put_back}")
            incident = self._incident
        else:
            incident = replace(
                self._incident, decision=replace(self._incident.decision, not_restored=put_back)
            )
        self.end(self._step(self._reading), self._reading, committed=False)
        if dropped_by_peer or peer is not None or self._dropped_late:
            self.context.outputs.note("veto", DROPPED_FOR_ANOTHER)
        self._dropped_late = False
        self._end_step(counts=not dropped_by_peer or self.shared.counts)
        self._conclude(incident, hold=True)
        self._timeline = self.context.budget.rewinds
        if peer is not None:
            peer._vetoed()
            peer.shared.drop(counts=False)  # its own call of step is still to come

    def _committed(self) -> None:
        """The optimizer has stepped; an update that made something non-finite is undone."""
        reading = self._reading
        step = self._judged
        undone: Reading | None = None
        if reading is not None and self._check is not None:
            undone = self._check.undone(reading)
        if step is None and (
            undone is not None or not self.micro_batches.first or self.context.hooks.committed
        ):
            step = self._step(reading)
        if undone is not None:
            assert step is not None
            self._reading, verdict = self.transaction.assess(step, undone)
            self._incident = self.transaction.respond(step, self._reading, verdict, None)
            self._vetoed()
            return
        self.dropped = False
        self.scan_update()
        self.end(step, reading, committed=True)
        self._end_step()

    def adopt(self, optimizer: Optimizer) -> None:
        """Guard this optimizer, which is about to step, in the place of the one before."""
        self._begin()
        context = self.context
        before = context.optimizer
        context.adopt(optimizer)
        owners[optimizer] = owners.pop(before)
        snapshots = self.rewinder.snapshots
        snapshots.run_state.adopt(optimizer, context.scheduler)
        snapshots.ring.clear()
        snapshots.kept.broken(context.step)
        self.rollback = ScheduleRollback(context)
        self._check = None
        self._stepping = 0
        self._hooks.close()
        self._hook_optimizer()

    def _hook_optimizer(self) -> None:
        optimizer = self.context.optimizer
        self._hook(optimizer, self._before_step, self._after_step)
        inner = inner_optimizer(optimizer)
        if inner is not None:
            self._hook(inner, self._before_inner, self._after_inner)

    def _hook(self, optimizer: Optimizer, before: Any, after: Any) -> None:
        # where `optimizer.step` is compiled, hooks must stay out of the graph
        outside: Any = torch.compiler.disable
        self._hooks.callback(optimizer.register_step_pre_hook(outside(before)).remove)
        self._hooks.callback(optimizer.register_step_post_hook(outside(after)).remove)

    # --- calls of patched torch functions -------------------------------------------------------

    def begin_micro(self, loss_fn: LossFn, batch: Any) -> None:
        """A framework is about to run one micro-batch; calls of the model are not kept then."""
        self.model_calls.off = True
        self._add_micro(loss_fn, batch)
        if self.looks.active:
            self.looks.saw_batch(batch)

    def loss_of(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Run the forward of one micro-batch for the loop, which calls backward on it itself.

        Calls of the model are kept as well: the loop may add something to the loss.
        """
        self._add_micro(loss_fn, batch)
        try:
            loss = total_loss(loss_fn(batch))
        except Exception as error:
            self.raised(error)
            raise
        self.micro_batches.hand_out(loss)
        return loss

    def _add_micro(self, loss_fn: LossFn, batch: Any) -> None:
        if not self.protect.armed:
            return
        with self.protect.region:
            self.boundary.root_called()
        with self.protect.part("micro-batches of the framework"):
            self.micro_batches.add(loss_fn, batch)
            self.observed.labels = count_labels(batch, self.context)

    def before_backward(self, root: Tensor) -> None:
        if not self._listening or not self.protect.armed:
            return
        if not self.looks.active and LiveTracing.armed is None:
            try:
                self._heard_loss(root)
            except Exception as fault:
                self.protect.failed(fault)
            return
        with self.protect.region, self.tracing.paused(), self.looks.paused():
            self._heard_loss(root)
        self.looks.loss_seen(root)
        with self.protect.part("live tracing"):
            self.tracing.before_backward(root)

    def _heard_loss(self, root: Tensor) -> None:
        self.reader.start()
        # a loss that was handed over is replayed
        outputs = self.model_calls.outputs if self.micro_batches.first else ()
        self.observed.before_backward(root, outputs)
        self.micro_batches.heard(root)

    def after_backward(self, root: Tensor, *, failed: bool) -> None:
        if not self._listening:
            return
        if failed and (self.model_calls.calls or not self.micro_batches.first):
            self.raised(sys.exc_info()[1])
        if not self.protect.armed:
            return
        ours = False
        if not self.looks.active:
            try:
                ours = self.observed.after_backward(failed=failed)
            except Exception as fault:
                self.protect.failed(fault)
        else:
            with self.protect.region, self.looks.paused():
                ours = self.observed.after_backward(failed=failed)
            self.looks.backward_over()
        self.wiring.backward(ours)
        if self._traced:
            with self.protect.part("live tracing"):
                self.tracing.after_backward(ours=ours)
        if ours:
            self.shared.got_gradients()

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        if not self.protect.armed:
            return
        if not self.looks.active:
            try:
                self.observed.after_norm(tensors, norm)
            except Exception as fault:
                self.protect.failed(fault)
            return
        with self.protect.region, self.looks.paused():
            self.observed.after_norm(tensors, norm)
        self.looks.norm_taken()

    def after_load(self) -> None:
        if self.protect.armed:
            with self.protect.region:
                self.context.buffers.remember()

    def around_update(self, scaler: GradScaler, update: Update, new_scale: Any) -> None:
        ours = scaler is self.context.scaler and self.context.scaling()
        if not ours or new_scale is not None:
            update(new_scale)
        elif self.observed.losses:
            # the scaler skipped by itself: the optimizer's hooks were never called
            reading = self._judge_unreached()
            if not self.vetoing:
                update(None)
                self.end(self._step(reading), reading, committed=False)
                self._end_step()
                self.rollback.scaler_skipped()
                return
            try:
                self._vetoed()
            finally:
                update(present_scale(self.context))
                self.rollback.scaler = False
        else:
            update(present_scale(self.context) if self.rollback.scaler else None)
            self.rollback.scaler = False

    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None:
        """Adopt a scaler that was not handed over: loss and gradients carry its factor."""
        context = self.context
        if context.scaler is not None or optimizer is not context.optimizer:
            return
        if scaler.is_enabled() and self.protect.armed:
            with self.protect.region:
                context.scaler = scaler
                self.rewinder.snapshots.run_state.scaler = scaler
                self.observed.divide(scaler._get_scale_async())

    def averages_nothing(self, average: AveragedModel, model: Any) -> bool:
        """Has this average taken in these weights already? Its loop does not know of vetoes."""
        if not isinstance(model, nn.Module) or unwrapped(model) is not self.shared.root:
            return False
        last_vetoed = self._fused is None and self.dropped
        if last_vetoed and self._averaged.get(average) == self.commits:
            return True
        self._averaged[average] = self.commits
        return False

    # --- optimizer hooks ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._stepping and calls_of_step(optimizer) < 2:
            self._stepping = 0  # the last one ended in an exception
        self._stepping += 1
        if self._stepping > 1:
            return None
        return self._before(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._stepping -= 1
        if not self._stepping:
            self._after(optimizer)

    def _before_inner(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The inner optimizer steps by itself: SAM's `second_step` calls no `step` of its own."""
        if self._stepping:
            return None
        return self._before(optimizer, args, kwargs)

    def _after_inner(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._stepping:
            self._after(optimizer)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Check the gradients; returns other arguments for `step` where it has a closure."""
        # close the last step, and take the snapshot that no call of the model has prompted
        if self._veto.hidden:
            # an exception of the optimizer ended that step: nothing has been put back yet
            self._vetoed()
        self._begin()
        if inside_backward():
            self.rewinder.snapshots.turn_off(IN_BACKWARD)
        if not self._start_seen and self.protect.armed:
            # the root module was not called, only its methods or its children
            with self.protect.part(SNAPSHOTS):
                if self.rewinder.snapshots.due():
                    self.rewinder.snapshots.before_update()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            # gradients from before a rewind belong to weights that are gone
            rewound = self._timeline != self.context.budget.rewinds
            if rewound or self.shared.is_dropped:
                self._refuse()
            else:
                self.check()
            return None
        if self.shared.is_dropped:
            self._refuse()
        checked = _nothing if self.vetoing else self._checked(optimizer, closure)
        rest = dict(kwargs)
        rest.pop("closure", None)
        return (args[0], checked, *args[2:]), rest

    def _checked(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, with a check of what each evaluation leaves."""
        if needs_closure(optimizer):
            self._copy_everything()
            return CheckedClosure(self, closure)
        if not evaluates_again(optimizer):

            def checked() -> Any:
                with torch.enable_grad():
                    out = closure()
                self.check()
                return out

            return checked
        if self.observed.losses:
            # SAM moves along the gradients that are there before it evaluates anything
            self.check()
            if self.vetoing:
                return _nothing
        self._copy_everything()
        return CheckedClosure(self, closure, again=True)

    def _copy_everything(self) -> None:
        """For an optimizer that moves weights before the gradients can be judged."""
        self._check = UpdateCheck(self.context, self.protect)
        self._check.copy_everything()

    def _after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or had nothing to do."""
        if self._veto.hidden:
            self._veto.give_back()
        theirs = found_inf(optimizer) if not self.protect.armed else None
        if theirs is not None and bool(theirs):
            return  # disarmed, and the scaler has told the kernel to do nothing
        if self._own_flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
            self._own_flag = False
        if self._fused is not None:
            self._issued(self._fused)
        elif self.vetoing:
            self._vetoed()
        else:
            self._committed()

    def finish(self) -> None:
        """The loop is over: take back what it did after a vetoed last update."""
        self.settle()
        self._take_back_schedule()


def _nothing() -> None:
    """In the place of a closure that must not be evaluated: the update is refused."""


class CheckedClosure:
    """The user's closure for LBFGS and SAM: each evaluation is checked, a bad one ends the rest."""

    def __init__(
        self, watcher: WatchDriver, closure: Callable[[], Any], *, again: bool = False
    ) -> None:
        """`again`: the step has been evaluated once already."""
        self._watcher = watcher
        self._closure = closure
        self._last: Any = None
        self._again = again

    def __call__(self) -> Any:
        if self._watcher.vetoing:
            return self._last
        self._watcher.forget()
        with torch.enable_grad():
            self._last = self._closure()
        self._watcher.check(again=self._again)
        self._again = True
        return self._last
