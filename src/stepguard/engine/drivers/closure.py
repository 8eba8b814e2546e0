"""Optimizers that call the loss several times a step (LBFGS, SAM): each evaluation is read, the
step can be undone.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stepguard.engine import step_end
from stepguard.engine.drivers.step import Stepper, skipped_after_all
from stepguard.engine.reader import MicroLoss
from stepguard.engine.recover.rerun import run_again
from stepguard.engine.result import StepResult
from stepguard.engine.transaction import FINITE_KINDS, let_through
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK, Verdict
from stepguard.sentinel.gradients import clip
from stepguard.state.rng import capture_rng
from stepguard.state.step import LossFn, Step
from stepguard.state.undo import UndoCopy
from stepguard.tensors.names import optimizer_parameter_ids


def needs_closure(optimizer: Optimizer) -> bool:
    """Does `step` evaluate the loss from the start, as often as it likes?"""
    if isinstance(optimizer, LBFGS):
        return True
    closure = _closure_parameter(optimizer)
    return (
        closure is not None and closure.default is closure.empty and not evaluates_again(optimizer)
    )


def evaluates_again(optimizer: Optimizer) -> bool:
    """Does `step` move along the gradients that are there, and then evaluate the loss once more
    (SAM and its kin)?
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return False
    if callable(getattr(optimizer, "first_step", None)) and callable(
        getattr(optimizer, "second_step", None)
    ):
        return True
    return _closure_parameter(optimizer) is not None and _insists(type(optimizer).step)


def takes_closure(optimizer: Optimizer) -> bool:
    """Can it not step without one?"""
    return needs_closure(optimizer) or evaluates_again(optimizer)


def _closure_parameter(optimizer: Optimizer) -> inspect.Parameter | None:
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(type(optimizer).step).parameters.get("closure")
    return None


@cache
def _insists(step: Callable[..., Any]) -> bool:
    """Does it refuse to work without a closure? Only its text tells."""
    with contextlib.suppress(OSError, TypeError):
        text = inspect.getsource(inspect.unwrap(step))
        return (
            re.search(r"assert closure\b(?! is None)|if closure is None:\s+raise", text) is not None
        )
    return False


def calls_of_step(optimizer: Optimizer) -> int:
    """How many calls of its step are under way, one inside the other."""
    frame: FrameType | None = sys._getframe()
    code, count = Optimizer.profile_hook_step(Optimizer.step).__code__, 0
    while frame is not None:
        count += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count


def inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """The one optimizer inside another that updates the same parameters; None where there is none,
    or several.
    """
    found = [
        item
        for item in vars(optimizer).values()
        if isinstance(item, Optimizer) and item is not optimizer
    ]
    if len(found) != 1:
        return None
    ours = optimizer_parameter_ids(optimizer)
    theirs = optimizer_parameter_ids(found[0])
    return found[0] if ours == theirs else None


class ClosureStepper(Stepper):
    """`guard.step` for LBFGS, and for SAM, whose first gradients are there before its closure is
    called.
    """

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        step = self.shield.call(None, self.begin, loss_fn, micro_batches)
        if step is None:
            return self._plain(loss_fn, micro_batches)
        step.began = capture_rng()
        evaluations = Evaluations(self, step)
        undo: UndoCopy | None = None
        try:
            if evaluates_again(self.context.optimizer):
                evaluations.evaluate()
                if evaluations.vetoed and evaluations.first is not None:
                    return self._undone(step, None, evaluations, evaluations.first)
            undo = UndoCopy(self.context.optimizer)
            self.context.optimizer.step(evaluations.closure)
        except Exception as error:
            if undo is not None:
                undo.restore()  # a line search may have moved the weights already
            incident = self.exceptions.in_step(step, error)
            if incident is None:
                raise
            return self.left_out(incident)
        reading = evaluations.first
        if evaluations.vetoed and reading is not None:
            return self._undone(step, undo, evaluations, reading)
        self.shield.call(None, self.reader.after_update)
        self._advance()
        if reading is not None:
            self._after(step, reading, went_through=True)
        return StepResult().resolve(reading, committed=True)

    def _undone(
        self, step: Step, undo: UndoCopy | None, evaluations: Evaluations, reading: Reading
    ) -> StepResult:
        context, incident = self.context, evaluations.incident
        unknown = undo.restore() if undo is not None else ()
        if unknown:
            self.recovery.say(
                "veto", f"the update was vetoed, but {', '.join(unknown)} cannot be compared"
            )
        context.buffers.restore()
        for parameter, gradient in evaluations.bad_gradients:
            parameter.grad = gradient
        self.shield.call(None, step_end.recorded, context, reading, went_through=False)
        context.step += 1
        if incident is not None:
            decided = skipped_after_all(incident)
            incident = self.shield.call(decided, step_end.apply, context, self.recovery, decided)
        again = run_again(self, step, incident)
        return again or StepResult().resolve(reading, committed=False, incident=incident)

    def _plain(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """The step of a disarmed guard."""

        def closure() -> float:
            self.context.optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for batch in micro_batches:
                loss = loss_fn(batch)
                assert isinstance(loss, Tensor)
                torch.autograd.backward(loss)
                total += float(loss)
            return total

        if evaluates_again(self.context.optimizer):
            closure()
        self.context.optimizer.step(closure)
        self._advance()
        self.context.step += 1
        return StepResult().resolve(None, committed=True)


class Evaluations:
    """The evaluations of one step. After a bad one the rest are cut short by gradients of zero."""

    def __init__(self, stepper: Stepper, step: Step) -> None:
        self._stepper, self._step = stepper, step
        self.first: Reading | None = None
        self.incident: Incident | None = None
        self.vetoed = False
        self.bad_gradients: list[tuple[Tensor, Tensor | None]] = []
        self._last: Tensor | None = None

    def closure(self) -> Any:
        """What the optimizer calls."""
        if self.vetoed and self._last is not None:
            return self._last
        return self.evaluate()

    def evaluate(self) -> Any:
        """Forward, backward and a look at what they leave."""
        self._step.rng.clear()
        losses = self._stepper.forward_backward(self._step)
        totals = [m.total.reshape(()) for m in losses]
        self._last = sum(totals[1:], start=totals[0])  # in order, as a loop adds them
        self._stepper.shield.call(None, self._read, losses)
        return self._last

    def _read(self, losses: list[MicroLoss]) -> None:
        stepper, context = self._stepper, self._stepper.context
        pending = stepper.reader.issue(losses)
        reading, verdict = self._judge(stepper.reader.complete(pending))
        self.first = self.first or reading
        if verdict.bad:
            if verdict.kind not in FINITE_KINDS:
                self._step.buffers.restore()  # before the replay, which starts from what is there
            self.incident = stepper.shield.call(
                None, stepper.pipeline.respond, self._step, reading, verdict
            )
            if not let_through(verdict, self.incident):
                self.first, self.vetoed = reading, True
                self.bad_gradients = [(p, p.grad) for p in context.parameters]
                silence(context.optimizer)
                return
            self.incident = None
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(
                context.parameters, context.config.clip_norm, pending.norm, known=reading.grad_norm
            )

    def _judge(self, reading: Reading) -> tuple[Reading, Verdict]:
        """Later evaluations lie along a line search: their losses say nothing about the run."""
        reading, verdict = self._stepper.assess(self._step, reading)
        along_the_line = self.first is not None and verdict.kind in FINITE_KINDS
        return reading, OK if along_the_line else verdict


def silence(optimizer: Optimizer) -> None:
    """Gradients of exactly zero end a line search at once."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)


def wrapped_once(closure: Callable[[], Any], check: Callable[[], None]) -> Callable[[], Any]:
    """A closure that is checked after it ran, for optimizers that call it once."""

    def checked() -> Any:
        with torch.enable_grad():
            out = closure()
        check()
        return out

    return checked


class Evaluated(Protocol):
    """Who looks at the evaluations of one step."""

    vetoing: bool

    def forget(self) -> None: ...
    def check(self, *, again: bool = False) -> None: ...


class Repeated:
    """The user's closure for LBFGS: every evaluation is checked, and a bad one silences the rest."""

    def __init__(
        self, watcher: Evaluated, closure: Callable[[], Any], *, again: bool = False
    ) -> None:
        """`again`: the step has been evaluated once already."""
        self._watcher, self._closure = watcher, closure
        self._last: Any = None
        self._count = int(again)

    def __call__(self) -> Any:
        if self._watcher.vetoing:
            return self._last
        self._watcher.forget()
        with torch.enable_grad():
            self._last = self._closure()
        self._watcher.check(again=self._count > 0)
        self._count += 1
        return self._last
