"""Optimizers that call the loss several times a step (LBFGS): each evaluation is read, the whole step can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stepguard.engine import settle as close
from stepguard.engine.again import run_again
from stepguard.engine.pipeline import FINITE_KINDS, let_through
from stepguard.engine.reader import MicroLoss
from stepguard.engine.result import StepResult
from stepguard.engine.stepper import Stepper
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK, Verdict
from stepguard.sentinel.gradients import clip
from stepguard.sentinel.undo import UndoCopy
from stepguard.state.rng import capture_rng
from stepguard.state.step import LossFn, Step


def needs_closure(optimizer: Optimizer) -> bool:
    """Does `step` insist on re-evaluating the loss by itself?"""
    return isinstance(optimizer, LBFGS)


class ClosureStepper(Stepper):
    """`guard.step` for LBFGS."""

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        step = self.shield.call(None, self.begin, loss_fn, micro_batches)
        if step is None:
            return self._plain(loss_fn, micro_batches)
        step.began = capture_rng()
        undo = UndoCopy(self.context.optimizer)
        evaluations = Evaluations(self, step)
        try:
            self.context.optimizer.step(evaluations.closure)
        except Exception as error:
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

    def _undone(self, step: Step, undo: UndoCopy, evaluations: Evaluations, reading: Reading) -> StepResult:
        context, incident = self.context, evaluations.incident
        undo.restore()
        context.buffers.restore()
        for parameter, gradient in evaluations.bad_gradients:
            parameter.grad = gradient
        self.shield.call(None, close.recorded, context, reading, went_through=False)
        context.step += 1
        if incident is not None:
            incident = self.shield.call(incident, close.apply, context, self.recovery, incident)
        again = run_again(self, step, incident)
        return again or StepResult().resolve(reading, committed=False, incident=incident)

    def _plain(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        def closure() -> float:
            self.context.optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for batch in micro_batches:
                loss = loss_fn(batch)
                assert isinstance(loss, Tensor)
                torch.autograd.backward(loss)
                total += float(loss)
            return total

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
            self.incident = stepper.shield.call(None, stepper.pipeline.respond, self._step, reading, verdict)
            if not let_through(verdict, self.incident):
                self.first, self.vetoed = reading, True
                self.bad_gradients = [(p, p.grad) for p in context.parameters]
                silence(context.optimizer)
                return
            self.incident = None
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(context.parameters, context.config.clip_norm, pending.norm, known=reading.grad_norm)

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

    def __init__(self, watcher: Evaluated, closure: Callable[[], Any]) -> None:
        self._watcher, self._closure = watcher, closure
        self._last: Any = None
        self._count = 0

    def __call__(self) -> Any:
        if self._watcher.vetoing:
            return self._last
        self._watcher.forget()
        with torch.enable_grad():
            self._last = self._closure()
        self._watcher.check(again=self._count > 0)
        self._count += 1
        return self._last
