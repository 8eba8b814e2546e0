"""What a watched step is made of, and how it begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.swa_utils import AveragedModel

from stepguard.engine.context import Context
from stepguard.engine.drivers.step_end import StepEnd
from stepguard.engine.drivers.update_check import UpdateCheck
from stepguard.engine.incident.exceptions import Exceptions
from stepguard.engine.protect import Protection
from stepguard.engine.reader import Pending
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.transaction import Transaction
from stepguard.engine.watch.between_steps import StepBoundary
from stepguard.engine.watch.gradient_veto import GradientVeto
from stepguard.engine.watch.live_tracing import LiveTracing
from stepguard.engine.watch.micro_batches import MicroBatches
from stepguard.engine.watch.model_calls import ModelCalls
from stepguard.engine.watch.observed_loss import ObservedLoss
from stepguard.engine.watch.schedule_rollback import ScheduleRollback
from stepguard.engine.watch.shared_backward import SharedBackward
from stepguard.engine.wiring import Wiring
from stepguard.locate.exception_origin import Attempt
from stepguard.records import Incident, Reading
from stepguard.state.step import Step

NOT_REMEMBERED = (
    "buffers stay as the step left them, because no call of the model was seen to begin it"
)


class WatchedStep:
    """The parts of one watch driver, and the step at hand."""

    def __init__(
        self, context: Context, protect: Protection, rewinder: Rewinder, wiring: Wiring
    ) -> None:
        self.context = context
        self.protect = protect
        self.rewinder = rewinder
        self.wiring = wiring
        self.tracing = LiveTracing(context)
        self.transaction = Transaction(
            context, protect, rewinder, self.tracing.locate, reruns=False
        )
        self.reader = self.transaction.reader
        self.step_end = StepEnd(context, protect, rewinder)
        self.looks = self.step_end.looks
        self.exceptions = Exceptions(context, protect, self.transaction)
        self.observed = ObservedLoss(context, self.reader.announce)
        self.rollback = ScheduleRollback(context)
        self.model_calls = ModelCalls(context.model, protect, self._model_called, self.raised)
        self.micro_batches = MicroBatches(self.not_listening)
        self.boundary = StepBoundary(context.roots.values(), self._step_begins)
        self.shared = SharedBackward(self)
        self._listening = True
        self.dropped = False
        """The last update was vetoed, as far as is known by now: a fused one is read later."""
        self._commits = 0
        """Updates that went through."""
        self._averaged: weakref.WeakKeyDictionary[AveragedModel, int] = weakref.WeakKeyDictionary()
        """Averages of this model -> updates that had gone through when each was last updated."""
        # --- of the step at hand
        self._reading: Reading | None = None
        self._incident: Incident | None = None
        self.vetoing = False
        """This step has been found bad: its update must not happen."""
        self._veto = GradientVeto(context)
        self._check = UpdateCheck(context, protect)
        self._begun = False
        """The update before this one has been closed."""
        self._remembered = False
        """Buffers are known as they were before this step."""
        self._timeline = 0
        """Rewinds before this step began: older gradients belong to weights that are gone."""
        context.resources.callback(self.boundary.close)
        context.resources.callback(self.shared.leave)
        self.remember()
        context.buffers.mark()

    # --- a step begins --------------------------------------------------------------------------

    def _model_called(self, arguments: dict[str, Any]) -> None:
        self.boundary.root_called()
        self.context.habits.calls += 1
        self.tracing.model_called(arguments)
        self.looks.saw_batch(arguments)

    def _step_begins(self) -> None:
        """Nothing of the next step has run yet; what the loop did since the update is its own."""
        with self.tracing.paused():
            self.between()
            if self.context.buffers.norms_ran():
                self.boundary.doubt()
            if not self._remembered or not self.context.buffers.norms_ran():
                self.remember()
        self._timeline = self.context.budget.rewinds
        self.looks.begin()

    def between(self) -> None:
        """The loop is between two steps; a snapshot needs the last one closed."""
        if self.rewinder.snapshots.due():
            self._begin()
        if self.protect.armed:
            with self.protect.part("snapshots and checkpoints"):
                self.rewinder.snapshots.between_steps()

    def remember(self) -> None:
        """Remember buffers and attributes of modules as they are now."""
        if self.protect.armed:
            with self.protect.region:
                self.context.remember()
        self._remembered = self.protect.armed

    def settle(self, *, inside: bool = False) -> bool:
        """Read a step whose verdict is still on the device, where there is one."""
        return False

    def _begin(self) -> None:
        """The loop has come to the next update: close the last one first."""
        if self._begun:
            return
        self._begun = True
        moved: bool | None = None
        if self.protect.armed:
            with self.protect.region:
                moved = self.rollback.moved()
        with self.tracing.paused():
            taken_back = self.settle()
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
        self.tracing.pause()
        self.looks.gradients_ready()
        if self.protect.armed:
            with self.protect.part("live tracing"):
                self.tracing.finish()

    def _issue(self) -> Pending:
        self.reader.start()
        return self.reader.issue(self.observed.losses, self.observed.norm())

    def _step(self, reading: Reading | None) -> Step:
        """The step at hand, as far as it can be run again."""
        context = self.context
        step = Step(
            *(context.step, context.model, context.optimizer, context.modules, context.buffers),
            sharded=context.sharded,
            summed_in_half=all(loss.summed_in_half for loss in self.observed.losses),
        )
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
        # the gradients of the outputs already carry the loss scale, so the step's own stays 1
        calls = self.model_calls.calls
        step.micro_batches = tuple(call.as_batch() for call in calls)
        step.rng = [call.rng for call in calls]
        step.lines = tuple(call.line for call in calls)
        return step

    def raised(self, error: BaseException | None, attempt: Attempt | None = None) -> None:
        """An exception passes through the model or its backward, and not in a replay."""
        if self._listening:
            self.looks.close()
            with self.tracing.paused(), self.not_listening():
                self.exceptions.in_loop(self._step(None), error, attempt)

    def forget(self) -> None:
        """Drop what was observed of a step that is over, or of a repeated evaluation."""
        self.observed.clear()
        self.model_calls.clear()
        self.micro_batches.clear()

    # --- how its update is stopped (transaction.VetoedUpdate) -----------------------------------

    def stop(self) -> None:
        """Hide the gradients from the optimizer."""
        self._veto.hide(self._check.undo)

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

    def _close_books(self, step: Step, reading: Reading | None, *, committed: bool) -> None:
        if committed:
            self._commits += 1
            self.step_end.committed(step, reading)
        else:
            self.step_end.dropped(reading)

    def _end_step(self, *, counts: bool = True) -> None:
        """The update is over. `counts`: it was a step of this guard."""
        if counts and not self.vetoing and self.protect.armed:
            with self.protect.part("silent failures"):
                self.observed.update_made()
        self._reading = None
        self._incident = None
        self.vetoing = False
        self._check = UpdateCheck(self.context, self.protect)
        self._begun = False
        self.forget()
        self.shared.stepped()
        if counts and not self._rewound():
            self.context.step += 1
        self._timeline = self.context.budget.rewinds
        self._remembered = False
        self.context.buffers.mark()
        self.boundary.open()
        if not self.boundary.reliable:
            # then nothing may tell where the next step begins
            self.remember()
        if self.protect.armed:
            with self.protect.part("live tracing"):
                self.tracing.begin()

    def _rewound(self) -> bool:
        """Has the state been put back since this step's forward pass?"""
        return self._timeline != self.context.budget.rewinds
