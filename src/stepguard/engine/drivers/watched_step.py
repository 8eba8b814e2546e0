"""What a watched step is made of, and how it is closed: booked, applied, and the next one opened."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim.swa_utils import AveragedModel

from stepguard.engine import step_end
from stepguard.engine.context import Context
from stepguard.engine.incident.exceptions import Exceptions
from stepguard.engine.incident.presumed_verdict import assess_or_presume
from stepguard.engine.protect import Shield
from stepguard.engine.reader import Pending, Reader
from stepguard.engine.recover.rewind import Recovery
from stepguard.engine.transaction import Pipeline
from stepguard.engine.watch.between_steps import Threshold
from stepguard.engine.watch.gradient_veto import HiddenGradients
from stepguard.engine.watch.live_tracing import Arming
from stepguard.engine.watch.micro_batches import MicroBatches
from stepguard.engine.watch.model_calls import Capture
from stepguard.engine.watch.observed_loss import Overheard
from stepguard.engine.watch.schedule_rollback import Hold
from stepguard.engine.watch.shared_backward import Peers
from stepguard.engine.wiring import Wiring
from stepguard.locate.exception_origin import Attempt
from stepguard.records import Incident, Reading
from stepguard.state.step import Step
from stepguard.state.undo import UndoCopy


class Watching:
    """The parts of one watcher, and the parts of its step."""

    def __init__(
        self, context: Context, shield: Shield, recovery: Recovery, wiring: Wiring
    ) -> None:
        self.context, self.shield, self.recovery, self.wiring = context, shield, recovery, wiring
        self.arming = Arming(context)
        self.reader, self.pipeline = (
            Reader(context),
            Pipeline(context, recovery, self.arming.locate, reruns=False),
        )
        self._assess = partial(assess_or_presume, context, shield, self.pipeline.assess)
        self.exceptions = Exceptions(context, shield, self.pipeline)
        recovery.after_rewind.append(self.reader.rewound)
        self.heard, self.hold = Overheard(context, self.reader.announce), Hold(context)
        self.capture = Capture(context.model, shield, self._model_called, self.raised)
        self.micro = MicroBatches(self._deaf)
        self.threshold = Threshold(context.roots.values(), self._step_begins)
        self.peers = Peers(self)
        self._listening = True
        self.dropped = False
        """The last update was vetoed, as far as is known by now: a fused one is read later."""
        self._reading: Reading | None = None
        self._incident: Incident | None = None
        self.vetoing = False
        """This step has been found bad: its update must not happen."""
        self._hidden = HiddenGradients(context)
        self._undo: UndoCopy | None = None
        self._begun = False
        """The update before this one has been closed."""
        self._remembered = False
        """Buffers are known as they were before this step."""
        self._timeline = 0
        """Rewinds before this step began: gradients from before a rewind belong to weights that are
        gone.
        """
        self._commits = 0
        """Updates that went through."""
        self._averaged: weakref.WeakKeyDictionary[AveragedModel, int] = weakref.WeakKeyDictionary()
        """Averages of this model, and how many updates had gone through when each was last brought
        up to date.
        """
        context.resources.callback(self.threshold.close)
        context.resources.callback(self.peers.leave)
        self.remember()
        context.buffers.mark()

    # --- a step begins
    # -----------------------------------------------------------------------------------------

    def _model_called(self, arguments: dict[str, Any]) -> None:
        self.threshold.root_called()
        self.arming.model_called(arguments)

    def _step_begins(self) -> None:
        """Before anything of the next step has run; what the loop did since the last update is its
        own.
        """
        with self.arming.paused():
            self.between()
            if self.context.buffers.norms_ran():
                self.threshold.doubt()
            if not self._remembered or not self.context.buffers.norms_ran():
                self.remember()
        self._timeline = self.context.budget.rewinds

    def between(self) -> None:
        """The loop is between two steps; a snapshot needs the last one closed."""
        if self.recovery.due():
            self._begin()
        self.shield.spare(None, self.recovery.between)

    def remember(self) -> None:
        """Buffers and attributes of modules as they are now."""
        self.shield.call(None, self.context.buffers.remember)
        self._remembered = self.shield.armed

    def restore_buffers(self) -> str:
        """As they were before this step; in words where its beginning was not seen and they stay."""
        if not self._remembered:
            return (
                "buffers stay as the step left them, because no call of the model was seen to "
                "begin it"
            )
        self.context.buffers.restore()
        return ""

    def settle(self, *, inside: bool = False) -> bool:
        """Read a step whose verdict is still on the device, where there is one."""
        return False

    def _begin(self) -> None:
        """The loop has come to the next update: close the last one first."""
        if self._begun:
            return
        self._begun = True
        moved = self.shield.call(None, self.hold.moved)
        with self.arming.paused():
            taken_back = self.settle()
        self.shield.call(None, self.hold.take_back, None if taken_back else moved)

    # --- what it is made of
    # ------------------------------------------------------------------------------------

    @contextmanager
    def _deaf(self) -> Iterator[None]:
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before

    def _end_trace(self) -> None:
        """From here on the guard works, not the user."""
        self.arming.pause()
        self.shield.spare(None, self.arming.finish)

    def _issue(self) -> Pending:
        self.reader.start()
        return self.reader.issue(self.heard.losses, self.heard.norm())

    def _step(self, reading: Reading | None) -> Step:
        context = self.context
        step = Step(
            context.step, context.model, context.optimizer, context.modules, context.buffers
        )
        if self.micro.complete(step, len(self.heard.losses)):
            step.clip_norm, step.grads_gone = context.config.clip_norm, self.heard.clipped
            step.scale = (reading.scale if reading is not None else None) or 1.0
            return step
        calls, step.model_fn = self.capture.calls, self.capture.model_fn()
        if step.model_fn is not None:
            # the gradients of the outputs already carry the loss scale, so the step's own scale
            # stays 1
            step.micro_batches = tuple(call.as_batch() for call in calls)
            step.rng, step.lines = [call.rng for call in calls], tuple(call.line for call in calls)
        elif reading is not None:
            step.scale = reading.scale or 1.0
        return step

    def raised(self, error: BaseException | None, attempt: Attempt | None = None) -> None:
        """An exception passes through the model or its backward, and not in a replay."""
        if self._listening:
            with self.arming.paused(), self._deaf():
                self.exceptions.in_loop(self._step(None), error, attempt)

    # --- it is closed
    # ------------------------------------------------------------------------------------------

    def _apply(self, incident: Incident | None, *, hold: bool) -> None:
        """What was decided may change the schedule, so it is held as it is afterwards."""
        try:
            if incident is not None:
                self.shield.call(None, step_end.apply, self.context, self.recovery, incident)
        finally:
            if hold:
                self.shield.call(None, self.hold.vetoed)

    def _book(self, step: Step, reading: Reading | None, *, went_through: bool) -> None:
        if went_through:
            self._commits += 1
            for hook in self.context.commit_hooks:
                hook()
        if reading is None:
            return
        if went_through:
            self.shield.call(None, step_end.committed, self.context, step, reading)
            self.shield.spare(None, self.recovery.committed, reading.step + 1)
        else:
            self.shield.spare(None, step_end.recorded, self.context, reading, went_through=False)

    def _end_step(self, *, counts: bool = True) -> None:
        self._reading, self._undo = None, None
        self._incident, self.vetoing = None, False
        self._begun = False
        self.forget()
        self.peers.stepped()
        if counts and not self._rewound():
            self.context.step += 1
        self._timeline = self.context.budget.rewinds
        self._remembered = False
        self.context.buffers.mark()
        self.threshold.open()
        if not self.threshold.reliable:  # then nothing may tell where the next step begins
            self.remember()
        self.shield.spare(None, self.arming.begin)

    def _rewound(self) -> bool:
        """Has the state been put back since this step's forward pass?"""
        return self._timeline != self.context.budget.rewinds

    def forget(self) -> None:
        """What was heard of a step that is over, or of an evaluation that is made again."""
        self.heard.clear()
        self.capture.clear()
        self.micro.clear()
