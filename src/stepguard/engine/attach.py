"""`watch`: the loop stays as it is, and the guard reads and vetoes inside `optimizer.step()`.

A pre-hook on the optimizer reads the gradients and, if they are bad, hides them, so that the update has nothing to do;
a post-hook gives them back. The loss and the pre-clip norm are overheard (sentinel/taps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepguard._errors import TrainingHalted
from stepguard.engine import settle as close
from stepguard.engine.capture import Capture
from stepguard.engine.closure import needs_closure, silence, wrapped_once
from stepguard.engine.context import Context
from stepguard.engine.examine import stored_trouble
from stepguard.engine.late import LateUpdate, takes_found_inf
from stepguard.engine.overhear import Overheard
from stepguard.engine.pipeline import Pipeline, let_through
from stepguard.engine.reader import Pending, Reader
from stepguard.engine.result import StepResult
from stepguard.engine.schedule import ScheduleCopy
from stepguard.engine.shield import Shield
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK, Verdict
from stepguard.sentinel.risk import risky_update
from stepguard.sentinel.stored import norm_statistics
from stepguard.sentinel.taps import listen
from stepguard.sentinel.undo import UndoCopy
from stepguard.state.step import Step


class Watcher:
    """Hooks of one guard on one optimizer."""

    def __init__(self, context: Context, shield: Shield) -> None:
        self.context, self.shield = context, shield
        self.reader, self.pipeline = Reader(context), Pipeline(context)
        self.heard = Overheard(context)
        self.capture = Capture(context.model)
        self._reading: Reading | None = None
        self._incident: Incident | None = None
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._undo: UndoCopy | None = None
        self._late: LateUpdate | None = None
        self._own_flag = False
        self._schedule: ScheduleCopy | None = None
        optimizer, resources = context.optimizer, context.resources
        resources.callback(self.capture.close)
        resources.callback(listen(self.heard))
        resources.callback(optimizer.register_step_pre_hook(self._before).remove)
        resources.callback(optimizer.register_step_post_hook(self._after).remove)
        if context.scaler is not None and context.scaling():
            _wrap_update(context.scaler, self._scaler_update)
            resources.callback(delattr, context.scaler, "update")
        context.buffers.remember()

    # --- hooks -------------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._check()
            return None
        if needs_closure(optimizer):
            self._undo = self.shield.call(None, UndoCopy, optimizer)
            checked: Callable[[], Any] = _Repeated(self, closure)
        else:
            checked = wrapped_once(closure, self._check)
        return (args[0], checked, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._give_back()
        if self._own_flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
            self._own_flag = False
        incident, self._incident = self._incident, None
        if self._late is not None:
            self.shield.call(None, self.reader.after_update)
            if norm_statistics(self.context.roots):
                self.settle()  # statistics must be put back before the next forward, so this cannot wait
            self._end_step()
        elif incident is not None:
            self._vetoed(incident)
        else:
            self._committed()

    # --- the parts of a step -----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Gradients are there and nothing has been updated yet."""
        self.settle()
        self._hold_schedule()
        self.shield.call(None, self.reader.start)
        pending = self.shield.call(None, self._issue)
        if pending is None:
            return
        if takes_found_inf(self.context.optimizer):
            self.shield.call(None, self._flag, pending)
            return
        reading = self.shield.call(None, self.reader.complete, pending)
        if reading is not None:
            self._judge(self._step(reading), reading)
            if self._incident is None and self._undo is None:
                risky = self.shield.call(False, risky_update, self.context.optimizer, self.context.lr_ceiling)
                self._undo = self.shield.call(None, UndoCopy, self.context.optimizer) if risky else None

    def _issue(self) -> Pending:
        return self.reader.issue(self.heard.losses, self.heard.norm())

    def _judge(self, step: Step, reading: Reading) -> None:
        reading, verdict = self.shield.call((reading, OK), self.pipeline.assess, step, reading)
        self._reading = reading
        if verdict.severity == "note":
            self.shield.call(None, self.pipeline.note, reading, verdict)
        if verdict.bad:
            self._hide()
            self._incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
            if self._incident is None or let_through(self._incident):
                self._incident = None
                self._give_back()

    def _flag(self, pending: Pending) -> None:
        """Fused: tell the kernel, read later. A scaler's own flag is kept and joined."""
        optimizer = self.context.optimizer
        step, flag = self._step(None), pending.suspect()
        theirs = getattr(optimizer, "found_inf", None)
        self._own_flag = theirs is None
        optimizer.found_inf = flag if theirs is None else torch.maximum(theirs, flag.to(theirs))  # type: ignore[attr-defined]
        self._late = LateUpdate(self.context, step, pending, StepResult())

    def settle(self) -> None:
        """Read a fused step whose verdict is still on the device."""
        late, self._late = self._late, None
        if late is None:
            return
        reading = self.shield.call(None, self.reader.complete, late.pending)
        if reading is None:
            return
        late.step.scale = reading.scale or 1.0
        reading, verdict = self.shield.call((reading, OK), self.pipeline.assess, late.step, reading)
        vetoed = late.vetoed(reading)
        if vetoed:
            late.take_back(self.context, calibrating=verdict.kind == "scale_calibration")
        if verdict.severity == "note":
            self.shield.call(None, self.pipeline.note, reading, verdict)
        self._finish_late(late, reading, verdict, vetoed=vetoed)

    def _finish_late(self, late: LateUpdate, reading: Reading, verdict: Verdict, *, vetoed: bool) -> None:
        context = self.context
        if not verdict.bad:
            self._book(late.step, reading, went_through=not vetoed)
            return
        incident = self.shield.call(None, self.pipeline.respond, late.step, reading, verdict, committed=not vetoed)
        self._book(late.step, reading, went_through=False)
        if incident is not None:
            close.apply(context, incident)

    def _vetoed(self, incident: Incident) -> None:
        context = self.context
        if self._undo is not None:
            self._undo.restore()
        context.buffers.restore()
        if context.scheduler is not None:
            self._schedule = ScheduleCopy(context.scheduler, context.optimizer)
        self._book(self._step(self._reading), self._reading, went_through=False)
        self._end_step()
        close.apply(context, incident)

    def _committed(self) -> None:
        context, reading, step = self.context, self._reading, self._step(self._reading)
        if self._undo is not None and reading is not None:
            born = self.shield.call([], stored_trouble, context)
            if born:
                self._undo.restore()
                reading = replace(reading, bad_state=tuple(born), state_born=True)
                reading, verdict = self.pipeline.assess(step, reading)
                incident = self.shield.call(None, self.pipeline.respond, step, reading, verdict)
                if incident is not None:
                    self._undo, self._reading = None, reading
                    self._vetoed(incident)
                return
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
        else:
            self.shield.call(None, close.recorded, self.context, reading, went_through=False)

    def _end_step(self) -> None:
        self._reading, self._undo = None, None
        self.heard.clear()
        self.capture.clear()
        self.context.step += 1
        if self._late is None:
            self.shield.call(None, self.context.buffers.remember)

    def _step(self, reading: Reading | None) -> Step:
        context = self.context
        step = Step(context.step, context.model, context.optimizer, context.modules, context.buffers)
        calls = self.capture.calls
        if calls and len({call.positional for call in calls}) == 1:
            # the gradients of the outputs already carry the loss scale, so the step's own scale stays 1
            step.loss_fn, step.model_only = self.capture.loss_fn, True
            step.micro_batches = tuple(call.as_batch() for call in calls)
            step.rng = [call.rng for call in calls]
        elif reading is not None:
            step.scale = reading.scale or 1.0
        return step

    # --- veto --------------------------------------------------------------------------------------------------

    def _hide(self) -> None:
        self._hidden = [(p, p.grad) for p in self.context.parameters]
        if self._undo is not None:  # a closure optimizer needs gradients to end on
            silence(self.context.optimizer)
            return
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _give_back(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _hold_schedule(self) -> None:
        """The loop has called scheduler.step() after a vetoed update; take that back before the next one."""
        if self._schedule is not None:
            self._schedule.restore()
            self._schedule = None

    def _scaler_update(self, update: Callable[..., None], new_scale: Any) -> None:
        """The scaler skipped by itself: the optimizer's hooks were never called."""
        if not self.heard.losses:
            update(new_scale)
            return
        pending = self.shield.call(None, self._issue)
        reading = self.shield.call(None, self.reader.complete, pending) if pending is not None else None
        if reading is not None:
            self._judge(self._step(reading), reading)
        self._give_back()
        incident, self._incident = self._incident, None
        if incident is None:
            update(new_scale)
            self._book(self._step(reading), reading, went_through=False)
            self._end_step()
            return
        try:
            self._vetoed(incident)
        except TrainingHalted:
            raise
        finally:
            scale = self.context.scaler._get_scale_async() if self.context.scaler is not None else None
            update(scale.clone() if scale is not None else None)


class _Repeated:
    """The closure of LBFGS: every evaluation is checked, and a bad one silences the rest."""

    def __init__(self, watcher: Watcher, closure: Callable[[], Any]) -> None:
        self._watcher, self._closure = watcher, closure
        self._last: Any = None

    def __call__(self) -> Any:
        if self._watcher._incident is not None:
            return self._last
        self._watcher.heard.clear()
        self._watcher.capture.clear()
        with torch.enable_grad():
            self._last = self._closure()
        self._watcher._check()
        return self._last


def _wrap_update(scaler: Any, around: Callable[[Callable[..., None], Any], None]) -> None:
    original = scaler.update

    def update(new_scale: Any = None) -> None:
        around(original, new_scale)

    scaler.update = update
