"""`watch`: the loop stays as it is, and the guard reads and vetoes inside `optimizer.step()`.

A pre-hook on the optimizer reads the gradients and, if they are bad, hides them, so that the update has nothing to do;
a post-hook gives them back. The loss and the pre-clip norm are overheard (sentinel/taps).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from stepguard.engine import settle as close
from stepguard.engine.arming import Arming
from stepguard.engine.capture import Capture
from stepguard.engine.closure import Repeated, needs_closure, wrapped_once
from stepguard.engine.context import Context
from stepguard.engine.examine import born_in_update
from stepguard.engine.exceptions import Exceptions
from stepguard.engine.hidden import HiddenGradients
from stepguard.engine.hold import Hold
from stepguard.engine.late import LateUpdate, found_inf, read_later
from stepguard.engine.micro import MicroBatches
from stepguard.engine.outlier_step import keep_out_outliers
from stepguard.engine.overhear import Overheard
from stepguard.engine.pipeline import FINITE_KINDS, Pipeline, let_through
from stepguard.engine.presumption import assess_or_presume
from stepguard.engine.reader import Pending, Reader, count_labels
from stepguard.engine.recovery import Recovery
from stepguard.engine.result import StepResult
from stepguard.engine.shield import Shield
from stepguard.engine.watched import watched_step
from stepguard.engine.wiring import Wiring
from stepguard.locate.raised import Attempt
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK, Verdict
from stepguard.sentinel.risk import risky_update
from stepguard.sentinel.taps import Update, listen
from stepguard.sentinel.undo import UndoCopy
from stepguard.state.buffers import BufferKeeper
from stepguard.state.step import LossFn, Step


class Watcher:
    """Hooks of one guard on one optimizer, and its ear at the taps."""

    def __init__(self, context: Context, shield: Shield, recovery: Recovery, wiring: Wiring) -> None:
        self.context, self.shield, self.recovery, self._wiring = context, shield, recovery, wiring
        self.arming = Arming(context)
        self.reader, self.pipeline = Reader(context), Pipeline(context, recovery, self.arming.locate, reruns=False)
        self._assess = partial(assess_or_presume, context, shield, self.pipeline.assess)
        recovery.after_rewind.append(self.reader.rewound)
        self.heard, self.hold = Overheard(context, self.reader.announce), Hold(context)
        self.exceptions = Exceptions(context, shield, self.pipeline)
        self.capture = Capture(context.model, shield, self._model_called, self.raised)
        self.micro = MicroBatches(self._deaf)
        self._listening = True
        self.dropped = False
        """The last update was vetoed, as far as is known by now: a fused one is read later."""
        self._reading: Reading | None = None
        self._incident: Incident | None = None
        self.vetoing = False
        """This step has been found bad: its update must not happen."""
        self._hidden = HiddenGradients(context)
        self._undo: UndoCopy | None = None
        self._late: LateUpdate | None = None
        self._own_flag = False
        self._begun = False
        """The update before this one has been closed."""
        self._timeline = 0
        """Rewinds before this step began: gradients from before a rewind belong to weights that are gone."""
        optimizer, resources = context.optimizer, context.resources
        resources.callback(self.capture.close)
        resources.callback(listen(self))
        resources.callback(self.arming.close)
        outside: Any = torch.compiler.disable  # of the graph, where `optimizer.step` is compiled
        resources.callback(optimizer.register_step_pre_hook(outside(self._before)).remove)
        resources.callback(optimizer.register_step_post_hook(outside(self._after)).remove)
        shield.call(None, context.buffers.remember)

    def begin_micro(self, loss_fn: LossFn, batch: Any) -> None:
        """A framework is about to run one micro-batch; the calls of the model need not be remembered then."""
        self.capture.off = True
        if self.micro.first:
            self.shield.call(None, self._step_begins)
        self.shield.spare(None, self.micro.add, loss_fn, batch)
        self.heard.labels = self.shield.spare(None, count_labels, batch, self.context)

    @contextmanager
    def _deaf(self) -> Iterator[None]:
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before

    def before_backward(self, root: Tensor) -> None:
        if not self._listening:
            return
        with self.arming.paused():
            self.shield.call(None, self.reader.start)
            self.shield.call(None, self.heard.before_backward, root)
        self.shield.spare(None, self.arming.before_backward, root)

    def after_backward(self, root: Tensor, *, failed: bool) -> None:
        if not self._listening:
            return
        if failed and (self.capture.calls or not self.micro.first):
            self.raised(sys.exc_info()[1])
        ours = self.shield.call(False, self.heard.after_backward, failed=failed)
        self._wiring.backward(ours)
        self.shield.spare(None, self.arming.after_backward, ours=ours)

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        self.shield.call(None, self.heard.after_norm, tensors, norm)

    def after_load(self) -> None:
        self.shield.call(None, self.context.buffers.remember)

    def around_update(self, scaler: GradScaler, update: Update, new_scale: Any) -> None:
        if scaler is not self.context.scaler or not self.context.scaling() or new_scale is not None:
            update(new_scale)
        elif self.heard.losses:
            self._scaler_skipped(update)
        else:
            update(close.present_scale(self.context) if self.hold.scaler else None)
            self.hold.scaler = False

    def _model_called(self, arguments: dict[str, Any]) -> None:
        if not self.capture.calls:
            self._step_begins()
        self.arming.model_called(arguments)

    def _step_begins(self) -> None:
        """Before anything of the next step has run."""
        self.between()
        self._timeline = self.context.budget.rewinds

    def between(self) -> None:
        """The loop is between two steps; a snapshot needs the last one closed."""
        if self.recovery.due():
            self._begin()
        self.shield.spare(None, self.recovery.between)

    def raised(self, error: BaseException | None, attempt: Attempt | None = None) -> None:
        """An exception passes through the model or its backward, and not in a replay."""
        if self._listening:
            with self.arming.paused(), self._deaf():
                self.exceptions.in_loop(self._step(None), error, attempt)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        self._begin()
        if self.recovery.due():  # the root module was not called, only its methods or its children
            self.shield.call(None, self.recovery.before_update)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None and self._rewound():
            self._hidden.hide(needs_some=self._undo is not None)
            self.vetoing = True
            return None
        if closure is None:
            self.check()
            return None
        if needs_closure(optimizer):
            self._undo = self.shield.spare(None, UndoCopy, optimizer)
            checked: Callable[[], Any] = Repeated(self, closure)
        else:
            checked = wrapped_once(closure, self.check)
        return (args[0], checked, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._hidden.give_back()
        theirs = found_inf(optimizer) if not self.shield.armed else None
        if theirs is not None and bool(theirs):
            return  # disarmed, and the scaler has told the kernel to do nothing
        if self._own_flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
            self._own_flag = False
        if self._late is not None:
            self._issued(self._late)
        elif self.vetoing:
            self._vetoed()
        else:
            self._committed()

    def _begin(self) -> None:
        """The loop has come to the next update: close the last one first."""
        if self._begun:
            return
        self._begun = True
        moved = self.shield.call(None, self.hold.moved)
        with self.arming.paused():
            taken_back = self.settle()
        self.shield.call(None, self.hold.take_back, None if taken_back else moved)

    def _end_trace(self) -> None:
        """From here on the guard works, not the user."""
        self.arming.pause()
        self.shield.spare(None, self.arming.finish)

    def check(self, *, again: bool = False) -> None:
        """Gradients are there and nothing has been updated yet. `again`: a further evaluation of the same step."""
        self._end_trace()
        pending = self.shield.call(None, self._issue)
        if pending is None:
            self.context.agreement.stay(self.context.step, self.context.parameters)
            return
        self._wiring.update(pending.norm)
        if read_later(self.context):
            self.shield.call(None, self._flag, pending)
            return
        reading = self.shield.call(None, self.reader.complete, pending)
        if reading is None:
            return
        self._judge(self._step(reading), reading, again=again)
        if not self.vetoing and self._undo is None:
            known = (self.context.optimizer, self.context.lr_ceiling, reading.least_norm)
            self._hidden.give_back_later(self.shield.spare(None, keep_out_outliers, self.context))
            risky = self.shield.spare(False, risky_update, *known)
            self._undo = self.shield.spare(None, UndoCopy, self.context.optimizer) if risky else None

    def _issue(self) -> Pending:
        self.reader.start()
        return self.reader.issue(self.heard.losses, self.heard.norm())

    def _judge(self, step: Step, reading: Reading, *, again: bool = False) -> None:
        reading, verdict = self._assess(step, reading)
        if again and verdict.kind in FINITE_KINDS:
            verdict = OK  # along a line search: such losses say nothing about the run
        if not again or verdict.bad:
            self._reading = reading
        if verdict.severity == "note":
            self.shield.spare(None, self.pipeline.note, reading, verdict)
        if verdict.bad:
            self._hidden.hide(needs_some=self._undo is not None)
            if verdict.kind not in FINITE_KINDS:
                self.shield.call(None, step.buffers.restore)  # before the replay, which starts from what is there
            self._incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
            self.vetoing = not let_through(verdict, self._incident)
            if not self.vetoing:
                self._hidden.give_back()

    def _flag(self, pending: Pending) -> None:
        """Fused: tell the kernel, read later. A scaler's own flag is kept and joined."""
        optimizer = self.context.optimizer
        late, theirs = LateUpdate(self.context, self._step(None), pending, StepResult()), found_inf(optimizer)
        if theirs is not None:
            late.flag = torch.maximum(theirs, late.flag.to(theirs))
        optimizer.found_inf = late.flag  # type: ignore[attr-defined]
        self._own_flag, self._late = theirs is None, late

    def _issued(self, late: LateUpdate) -> None:
        """A fused update is on its way. Changed buffers cannot wait: the next forward needs them put back."""
        self.shield.call(None, self.reader.after_update)
        self.shield.call(None, late.issued, self.context)
        try:
            self.dropped = False
            if self.context.buffers.changing():
                self.dropped = self.settle(inside=True)
            else:
                late.step.buffers = BufferKeeper(())
        finally:
            self._end_step()

    def settle(self, *, inside: bool = False) -> bool:
        """Read a fused step whose verdict is still on the device; `inside` optimizer.step() or later.

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
        vetoed = late.vetoed(reading)
        if vetoed and not verdict.bad:
            self.hold.scaler_skipped()
        elif vetoed:
            late.take_back(self.context, calibrating=False, schedule=self.hold.every_step)
        self._finish_late(late, reading, verdict, vetoed=vetoed, inside=inside)
        return vetoed and verdict.bad

    def _finish_late(self, late: LateUpdate, reading: Reading, verdict: Verdict, *, vetoed: bool, inside: bool) -> None:
        if not verdict.bad:
            self._book(late.step, reading, went_through=not vetoed)
            return
        incident = self.shield.call(None, self.pipeline.respond, late.step, reading, verdict, committed=not vetoed)
        self._book(late.step, reading, went_through=not vetoed)
        self._apply(incident, hold=vetoed and inside)

    def _vetoed(self) -> None:
        incident, self.dropped = self._incident, True
        if self._undo is not None:
            self._undo.restore()
        self.context.buffers.restore()
        self._book(self._step(self._reading), self._reading, went_through=False)
        self._end_step()
        self._apply(incident, hold=True)
        self._timeline = self.context.budget.rewinds

    def _apply(self, incident: Incident | None, *, hold: bool) -> None:
        """What was decided may change the schedule, so it is held as it is afterwards."""
        try:
            if incident is not None:
                self.shield.call(None, close.apply, self.context, self.recovery, incident)
        finally:
            if hold:
                self.shield.call(None, self.hold.vetoed)

    def _committed(self) -> None:
        context, reading, step = self.context, self._reading, self._step(self._reading)
        born = self.shield.spare([], born_in_update, context) if self._undo is not None and reading is not None else []
        if born and self._undo is not None and reading is not None:
            self._undo.restore()
            reading = replace(reading, bad_state=tuple(born), state_born=True)
            reading, verdict = self._assess(step, reading)
            self._reading = reading
            self._incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
            self._vetoed()
            return
        self.dropped = False
        self.shield.call(None, self.reader.after_update)
        self._book(step, reading, went_through=True)
        self._end_step()

    def _book(self, step: Step, reading: Reading | None, *, went_through: bool) -> None:
        if went_through:
            for hook in self.context.commit_hooks:
                hook()
        if reading is None:
            return
        if went_through:
            self.shield.call(None, close.committed, self.context, step, reading)
            self.shield.spare(None, self.recovery.committed, reading.step + 1)
        else:
            self.shield.spare(None, close.recorded, self.context, reading, went_through=False)

    def _end_step(self) -> None:
        self._reading, self._undo = None, None
        self._incident, self.vetoing = None, False
        self._begun = False
        self.forget()
        if not self._rewound():
            self.context.step += 1
        self._timeline = self.context.budget.rewinds
        self.shield.call(None, self.context.buffers.remember)
        self.shield.spare(None, self.arming.begin)

    def _rewound(self) -> bool:
        """Has the state been put back since this step's forward pass?"""
        return self._timeline != self.context.budget.rewinds

    def forget(self) -> None:
        """What was heard of a step that is over, or of an evaluation that is made again."""
        self.heard.clear()
        self.capture.clear()
        self.micro.clear()

    def _step(self, reading: Reading | None) -> Step:
        return watched_step(self.context, self.micro, self.capture, self.heard, reading)

    def finish(self) -> None:
        """The loop is over: nothing else takes back what it did after a vetoed last update."""
        self.settle()
        self.shield.call(None, self.hold.take_back)

    def _scaler_skipped(self, update: Update) -> None:
        """The scaler skipped by itself: the optimizer's hooks were never called."""
        self._begin()
        self._end_trace()
        pending = self.shield.call(None, self._issue)
        reading = self.shield.call(None, self.reader.complete, pending) if pending is not None else None
        if reading is not None:
            self._judge(self._step(reading), reading)
        self._hidden.give_back()
        if not self.vetoing:
            update(None)
            self._book(self._step(reading), reading, went_through=False)
            self._end_step()
            self.hold.scaler_skipped()
            return
        try:
            self._vetoed()
        finally:
            update(close.present_scale(self.context))
            self.hold.scaler = False
