"""Optimizers that call the loss several times a step (LBFGS, SAM).

Each evaluation is read and judged, and the step can be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepguard.engine.drivers.optimizer_kinds import evaluates_again
from stepguard.engine.drivers.step import StepDriver
from stepguard.engine.incident.outcome import let_through, skipped_after_all
from stepguard.engine.reader import MicroLoss
from stepguard.engine.recover.rerun import run_again
from stepguard.engine.result import StepResult
from stepguard.records import Incident, Reading
from stepguard.records.verdict import OK
from stepguard.sentinel.gradients import clip
from stepguard.state.rng import capture_rng
from stepguard.state.step import LossFn, Step
from stepguard.state.undo import UndoCopy


class ClosureDriver(StepDriver):
    """`guard.step` for LBFGS, and for SAM, whose first gradients come before its closure."""

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """One step, whose loss the optimizer may evaluate several times."""
        context = self.context
        step = self.begin(loss_fn, micro_batches)
        if step is None:
            return self._unguarded_closure(loss_fn, micro_batches)
        step.began = capture_rng()
        evaluations = Evaluations(self, step)
        undo: UndoCopy | None = None
        try:
            if evaluates_again(context.optimizer):
                evaluations.evaluate()
            if not evaluations.vetoed:
                undo = UndoCopy(context.optimizer)
                context.optimizer.step(evaluations.closure)
        except Exception as error:
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
        self.step_end.dropped(reading)
        self.context.step += 1
        incident = self.transaction.conclude(skipped_after_all(evaluations.incident))
        second = run_again(self, step, incident)
        if second is not None:
            return second
        return StepResult().resolve(reading, committed=False, incident=incident)

    def _unguarded_closure(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult:
        """The step of a disarmed guard."""
        optimizer = self.context.optimizer

        def closure() -> float:
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for batch in micro_batches:
                loss = loss_fn(batch)
                assert isinstance(loss, Tensor)
                torch.autograd.backward(loss)
                total += float(loss)
            return total

        if evaluates_again(optimizer):
            closure()
        optimizer.step(closure)
        self.after_update()
        self.context.step += 1
        return StepResult().resolve(None, committed=True)


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

    def closure(self) -> Any:
        """What the optimizer calls."""
        if self.vetoed and self._last is not None:
            return self._last
        return self.evaluate()

    def evaluate(self) -> Any:
        """Run forward and backward, and read what they leave."""
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
            update = ClosureUpdate(self._step, context.optimizer)
            incident = transaction.respond(self._step, reading, verdict, update)
            if not let_through(verdict, incident):
                self.incident = incident
                self.first = reading
                self.vetoed = True
                self.bad_gradients = update.silence()
                return
        if context.config.clip_norm is not None and pending.norm is not None:
            clip(
                context.parameters, context.config.clip_norm, pending.norm, known=reading.grad_norm
            )


class ClosureUpdate:
    """An update in the middle of its evaluations; gradients of zero end a line search at once."""

    def __init__(self, step: Step, optimizer: Optimizer) -> None:
        self._step = step
        self._optimizer = optimizer

    def stop(self) -> None:
        """Nothing yet: the gradients are needed until the step is located (see `silence`)."""

    def restore_buffers(self) -> None:
        self._step.buffers.restore()

    def silence(self) -> list[tuple[Tensor, Tensor | None]]:
        """Put zeros in the place of the gradients, and return those."""
        kept = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                kept.append((parameter, parameter.grad))
                parameter.grad = torch.zeros_like(parameter)
        return kept


def checked_once(closure: Callable[[], Any], check: Callable[[], None]) -> Callable[[], Any]:
    """A closure that is checked after it ran, for optimizers that call it once."""

    def checked() -> Any:
        with torch.enable_grad():
            out = closure()
        check()
        return out

    return checked


class Evaluated(Protocol):
    """Checks the evaluations of one watched step."""

    vetoing: bool

    def forget(self) -> None:
        """Drop what was observed of an evaluation that is made again."""

    def check(self, *, again: bool = False) -> None:
        """Read and judge what an evaluation left."""


class CheckedClosure:
    """The user's closure for LBFGS and SAM: each evaluation is checked, a bad one ends the rest."""

    def __init__(
        self, watcher: Evaluated, closure: Callable[[], Any], *, again: bool = False
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
