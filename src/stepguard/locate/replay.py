"""Run one micro-batch of the bad step again: same RNG, buffers, batch and loss scale.

The user's loss function is called from this file: its frames mark where the user's code begins, see
`source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepguard.locate import batch as batches
from stepguard.locate.autocast_dtype import AutocastObserver
from stepguard.locate.calls import Stage
from stepguard.locate.finite import numeric
from stepguard.locate.locate_budget import LocateBudget
from stepguard.locate.loss_function_state import LossFunctionState
from stepguard.locate.module_attributes import kept_tensors
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import restore_rng
from stepguard.state.step import Step, total_loss
from stepguard.tensors.names import named_buffers, named_parameters
from stepguard.tensors.values import is_finite


class ReplayError(Exception):
    """The user's code raised an exception in a replay; the cause is chained."""


@dataclass(slots=True)
class Ran:
    """Result of a replayed micro-batch."""

    loss_finite: bool
    grads_finite: bool = True
    loss: Tensor | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the loss."""
    bad_gradients: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.loss_finite and self.grads_finite


@dataclass(slots=True)
class Traced:
    """A replayed micro-batch with its trace."""

    ran: Ran
    tracer: Tracer
    micro_batch: int


class Replayer:
    """Runs micro-batches of one step, inside `untouched`."""

    def __init__(
        self, step: Step, keeper: BufferKeeper, budget: LocateBudget | None = None
    ) -> None:
        self.step = step
        self.loss_fn_state: LossFunctionState | None = None
        """State of the loss function's own: put back before every run, so that all are alike."""
        self.first_traced: Ran | None = None
        """Result of the first trace, before anything in the batch was repaired."""
        self.budget = budget if budget is not None else LocateBudget()
        self._keeper = keeper
        roots = step.named_roots()
        self.parameters = dict(named_parameters(roots))
        self.buffers = dict(named_buffers(roots))

    def run(
        self, micro: int, batch: Any = None, *, backward: bool = True, eager: bool = True
    ) -> Ran:
        """Run without a trace. `batch` replaces the recorded one. Gradients are accumulated."""
        if batch is None:
            batch = self.step.micro_batches[micro]
        with _eagerly() if eager else nullcontext():
            return self._run(micro, batches.duplicate(batch), backward, None)

    def trace(
        self, micro: int, batch: Any = None, *, backward: bool = True, reach: bool = False
    ) -> Traced:
        """Run with a trace of every operation. The backward of a bad loss is left out.

        `reach`: measure magnitudes too.
        """
        spans = ModuleSpans(self.step.named_roots())
        tracer = self.new_tracer(spans)
        tracer.measures_reach = reach
        if batch is None:
            batch = self.step.micro_batches[micro]
        copied = batches.duplicate(batch)
        # A tensor can be reached by several names. The last one counts: a parameter that a module
        # keeps in a list as well is that parameter.
        for name, tensor in kept_tensors(self.step.named_roots()):
            tracer.store(name, tensor)
        for name, tensor in batches.named_tensors(copied):
            tracer.store(name, tensor)
        for name, parameter in self.parameters.items():
            tracer.store(f"param:{name}", parameter)
            if parameter.grad is not None:
                tracer.store(f"grad:{name}", parameter.grad)
        for name, buffer in self.buffers.items():
            tracer.store(f"buffer:{name}", buffer)
        observer = AutocastObserver(p.device.type for p in self.parameters.values())
        with self.budget.first_trace(), _eagerly(), spans, observer:
            ran = self._run(micro, copied, backward, tracer)
        tracer.autocast = observer.dtype
        self.first_traced = self.first_traced or ran
        return Traced(ran, tracer, micro)

    def new_tracer(self, spans: ModuleSpans) -> Tracer:
        """Make the tracer; a subclass may use another one."""
        return Tracer(spans)

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def copied_gradients(self) -> dict[str, Tensor]:
        """Copy the present gradients, by the name of the parameter."""
        copies = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                copies[name] = parameter.grad.clone()
        return copies

    def bad_gradients(self) -> list[str]:
        """Name the parameters whose gradient holds a NaN or Inf."""
        bad = []
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is not None and numeric(grad) and not is_finite(grad):
                bad.append(name)
        return bad

    def _prepare(self, micro: int) -> None:
        """Put back what a run may have changed, except for gradients."""
        self._keeper.restore()
        if self.loss_fn_state is not None:
            self.loss_fn_state.restore()
        restore_rng(self.step.rng[min(micro, len(self.step.rng) - 1)])

    def _run(self, micro: int, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        self._prepare(micro)
        assert self.step.loss_fn is not None
        try:
            with tracing(tracer, "forward"):
                given = self.step.loss_fn(batch)
                loss = total_loss(given)
            ran = Ran(loss_finite=is_finite(loss), loss=loss.detach(), parts=_parts(given))
            if backward and ran.loss_finite and loss.requires_grad:
                with tracing(tracer, "backward"):
                    self._backward(loss)
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if backward and ran.loss_finite:
            ran.bad_gradients = tuple(self.bad_gradients())
            ran.grads_finite = not ran.bad_gradients
        return ran

    def _backward(self, loss: Tensor) -> None:
        if self.step.scale != 1.0:
            loss = loss * self.step.scale
        # Not loss.backward(), which a watching guard would take for the loop's.
        torch.autograd.backward(loss)


def tracing(tracer: Tracer | None, stage: Stage) -> Any:
    """Return a context in which operations are traced, if there is a tracer.

    Only the user's code runs inside: tests of the guard's own are not part of the step.
    """
    if tracer is None:
        return nullcontext()
    tracer.stage = stage
    return tracer


def _eagerly() -> Any:
    """Return a context in which compiled code runs as written: a trace needs every operation."""
    return torch.compiler.set_stance("force_eager")


def _parts(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return {}
    return {str(name): float(part.detach()) for name, part in given.items()}
