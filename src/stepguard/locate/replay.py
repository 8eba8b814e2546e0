"""Run one micro-batch of the bad step again: same RNG, buffers, batch and loss scale.

The user's loss function is called from this file: its frames mark where the user's code begins, see
`source`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stepguard.locate import evidence
from stepguard.locate import replay_state as batches
from stepguard.locate.evidence import AutocastObserver
from stepguard.locate.operands import Stage, numeric
from stepguard.locate.replay_state import (
    LocateBudget,
    LossFunctionState,
    kept_tensors,
    named_tensors,
)
from stepguard.locate.source import Line, ModuleSpans, with_source
from stepguard.locate.tracer import Tracer
from stepguard.records.incident import Origin, Reading
from stepguard.state.batch import OUTPUT_GRADIENT, Step, total_loss
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import restore_rng
from stepguard.tensors.names import named_buffers, named_parameters
from stepguard.tensors.values import is_finite

# --- Run one micro-batch of the bad step again: same RNG, buffers, batch and loss scale.


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

    def _run(self, micro: int, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        # Put back what a run may have changed, except for gradients.
        self._keeper.restore()
        if self.loss_fn_state is not None:
            self.loss_fn_state.restore()
        restore_rng(self.step.rng[min(micro, len(self.step.rng) - 1)])
        backward = backward and self._goes_back(micro)
        try:
            ran = self._passes(batch, backward, tracer)
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if backward and ran.loss_finite:
            ran.bad_gradients = tuple(self.bad_gradients())
            ran.grads_finite = not ran.bad_gradients
        return ran

    def _goes_back(self, micro: int) -> bool:
        return True

    def _passes(self, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        """Run the forward pass and, where the loss is finite, the backward pass."""
        assert self.step.loss_fn is not None
        with tracing(tracer, "forward"):
            given = self.step.loss_fn(batch)
            loss = total_loss(given)
        parts: dict[str, float] = {}
        if isinstance(given, Mapping):
            parts = {str(name): float(part.detach()) for name, part in given.items()}
        ran = Ran(loss_finite=is_finite(loss), loss=loss.detach(), parts=parts)
        if backward and ran.loss_finite and loss.requires_grad:
            with tracing(tracer, "backward"):
                if self.step.scale != 1.0:
                    loss = loss * self.step.scale
                # Not loss.backward(), which a watching guard would take for the loop's.
                torch.autograd.backward(loss)
        return ran


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


# --- Loss functions that depend on more than their batch: on state of their own, or on chance.


ROUNDING = 1e-3
"""Relative difference of two losses that an unordered sum may explain."""
MOST_NAMED = 3


@contextmanager
def kept_loss_function_state(step: Step) -> Iterator[LossFunctionState]:
    """Remember the loss function's own state and put it back: replays must not use it up."""
    own = LossFunctionState(step.loss_fn)
    try:
        yield own
    finally:
        own.restore()


def different_losses(replayer: Replayer) -> tuple[float, float] | None:
    """Run two more forward passes: finite losses that are far apart show an impure function."""
    if replayer.step.model_only or not replayer.budget.affords(1.0):
        return None
    # Let the state move on as it does in the loop.
    own = replayer.loss_fn_state
    replayer.loss_fn_state = None
    runs: list[list[float]] = [[], []]
    try:
        for losses in runs:
            for micro in range(len(replayer.step.micro_batches)):
                loss = replayer.run(micro, backward=False).loss
                assert loss is not None
                losses.append(float(loss))
    finally:
        replayer.loss_fn_state = own
    for one, other in zip(*runs, strict=True):
        both_finite = math.isfinite(one) and math.isfinite(other)
        if both_finite and not math.isclose(one, other, rel_tol=ROUNDING, abs_tol=1e-9):
            return one, other
    return None


# --- Replay a watched step, of which only the model's part can be run again.


METHOD = "output-gradient"
OUTSIDE_FORWARD = (
    "born outside the model: run again, its outputs are finite; the loss expression was not seen"
)
OUTSIDE_BACKWARD = (
    "born outside the model: the gradient that came back to its outputs is bad already; "
    "the loss expression was not seen"
)
OUTSIDE_BOTH = (
    "the model run again gives finite gradients, so the bad one came another way: a parameter used "
    "outside the model's forward, a hook, or something transient"
)
CAME_IN = (
    "the bad value came into the model through an argument that was computed before; that "
    "part was not seen"
)


class ModelReplayer(Replayer):
    """Runs the recorded calls of the model; `Ran.loss` is the first bad output, or the first."""

    any_gradient = False
    """Run the backward also where what came back is bad, with ones for it."""

    def bad_call(self) -> int | None:
        """Return the first call whose outputs, or else whose gradients, are bad when run again."""
        for backward in (False, True):
            for call in range(len(self.step.micro_batches)):
                self.clear_gradients()
                if not self.run(call, backward=backward).clean:
                    self.clear_gradients()
                    return call
        return None

    def came_back_finite(self, call: int) -> bool:
        """True if what the loss sent back to the outputs of this call is finite."""
        return all(map(is_finite, self.step.micro_batches[call][OUTPUT_GRADIENT].values()))

    def with_caller(self, origin: Origin, call: int | None) -> Origin:
        """Add what a full replay knows from the user's frames: the line that called the model."""
        if call is None or origin.phase not in ("input", "forward", "backward"):
            return origin
        arguments = dict(named_tensors(self.step.micro_batches[call]))
        argument = arguments.get(origin.tensor or "")
        if origin.phase == "input" and argument is not None and argument.grad_fn is not None:
            # Not data, but the result of operations.
            return replace(
                origin,
                phase="forward",
                tensor=None,
                module=None,
                op=None,
                reproduced=None,
                remarks=(*origin.remarks, CAME_IN),
            )
        if origin.source is not None or call >= len(self.step.lines):
            return origin
        recorded = self.step.lines[call]
        if recorded is None:
            return origin
        return with_source(origin, Line(*recorded))

    def _goes_back(self, micro: int) -> bool:
        return self.any_gradient or self.came_back_finite(micro)

    def _passes(self, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        assert self.step.model_fn is not None
        with tracing(tracer, "forward"):
            outputs, gradients = self.step.model_fn(batch)
        bad = [output for output in outputs if not is_finite(output)]
        # Start the backward at the outputs that the loss sent a gradient to.
        reached: list[Tensor] = []
        received: list[Tensor] = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and backward and not bad:
                reached.append(output)
                received.append(gradient if is_finite(gradient) else torch.ones_like(gradient))
        if reached:
            with tracing(tracer, "backward"):
                torch.autograd.backward(reached, received)
        first = next(iter(bad or outputs), None)
        return Ran(loss_finite=not bad, loss=None if first is None else first.detach())


def outside_model(replayer: ModelReplayer, reading: Reading) -> Origin:
    """Say where the bad value was not made, when the model's part is clean."""
    if reading.bad_state and not reading.state_born:
        return evidence.state_origin(replayer.step, reading)
    origin = Origin(
        step=reading.step,
        phase="backward",
        micro_batch=evidence.first_bad_micro_batch(reading),
        method=METHOD,
    )
    if evidence.loss_is_bad(reading):
        return replace(origin, phase="loss", remarks=(OUTSIDE_FORWARD,))
    calls = range(len(replayer.step.micro_batches))
    if all(map(replayer.came_back_finite, calls)):
        return replace(origin, remarks=(OUTSIDE_BOTH,))
    return replace(origin, remarks=(OUTSIDE_BACKWARD,))


# --- Compare the fault of a replay with the fault that was seen: NaN, +inf and -inf are
# different.


def kind(value: float) -> str:
    """`nan`, `+inf`, `-inf` or `finite`."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return "finite"


def difference(reading: Reading, micro: int, replayer: Replayer) -> str | None:
    """Say in which way the replayed micro-batch goes bad differently; None if it agrees."""
    ran = replayer.first_traced
    if ran is None or replayer.step.model_only:
        return None
    if micro < len(reading.micro_losses) and ran.loss is not None:
        seen = kind(reading.micro_losses[micro])
        given = kind(float(ran.loss))
        if seen != given:
            return f"the loss was {seen} and the replay gives {given}"
    # The parts in a reading are sums over the micro-batches.
    for name, value in reading.components.items() if len(reading.micro_losses) == 1 else ():
        given = kind(ran.parts.get(name, value))
        if given != kind(value):
            return f"the loss part {name!r} was {kind(value)} and the replay gives {given}"
    # A replay leaves out the backward of a bad loss, so it may name no gradient at all.
    was = reading.bad_grads
    now = ran.bad_gradients
    if now and was and not set(now) & set(was):
        return f"the gradient of {was[0]} was non-finite and the replay breaks that of {now[0]}"
    return None
