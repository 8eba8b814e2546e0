"""Replay a watched step, of which only the model's part can be run again.

The model gets the arguments and random numbers it had, and its outputs the gradients that came back
to them. A bad value that is made inside the model is found as in a full replay. One that is not was
made in the user's own loss expression, and the origin says so instead of guessing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepguard.locate import bad_state
from stepguard.locate.batch import named_tensors
from stepguard.locate.replay import Ran, Replayer, ReplayError, tracing
from stepguard.locate.source import Line, with_source
from stepguard.locate.tracer import Tracer
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.batch import OUTPUT_GRADIENT
from stepguard.tensors.values import is_finite

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
        if origin.phase == "input" and origin.tensor in self._computed_arguments(call):
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

    def _computed_arguments(self, call: int) -> list[str]:
        """Name the arguments of this call that are not data but the result of operations."""
        computed = []
        for name, tensor in named_tensors(self.step.micro_batches[call]):
            if tensor.grad_fn is not None:
                computed.append(name)
        return computed

    def _run(self, micro: int, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        self._prepare(micro)
        assert self.step.model_fn is not None
        backward = backward and (self.any_gradient or self.came_back_finite(micro))
        try:
            with tracing(tracer, "forward"):
                outputs, gradients = self.step.model_fn(batch)
            ran = _forward_result(outputs)
            if backward and ran.loss_finite:
                self._backward_from(outputs, gradients, tracer)
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if backward and ran.loss_finite:
            ran.grads_finite = not self.bad_gradients()
        return ran

    def _backward_from(
        self, outputs: list[Tensor], gradients: list[Tensor | None], tracer: Tracer | None
    ) -> None:
        """Start the backward at the outputs that the loss sent a gradient to."""
        reached = []
        received = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                reached.append(output)
                received.append(gradient if is_finite(gradient) else torch.ones_like(gradient))
        if reached:
            with tracing(tracer, "backward"):
                torch.autograd.backward(reached, received)


def _forward_result(outputs: list[Tensor]) -> Ran:
    """Take the first bad output for the loss, or else the first one."""
    for output in outputs:
        if not is_finite(output):
            return Ran(loss_finite=False, loss=output.detach())
    return Ran(loss_finite=True, loss=outputs[0].detach() if outputs else None)


def outside_model(replayer: ModelReplayer, reading: Reading) -> Origin:
    """Say where the bad value was not made, when the model's part is clean."""
    if reading.bad_state and not reading.state_born:
        return bad_state.state_origin(replayer.step, reading)
    origin = Origin(
        step=reading.step,
        phase="backward",
        micro_batch=bad_state.first_bad_micro_batch(reading),
        method=METHOD,
    )
    if bad_state.loss_is_bad(reading):
        return replace(origin, phase="loss", remarks=(OUTSIDE_FORWARD,))
    calls = range(len(replayer.step.micro_batches))
    if all(map(replayer.came_back_finite, calls)):
        return replace(origin, remarks=(OUTSIDE_BOTH,))
    return replace(origin, remarks=(OUTSIDE_BACKWARD,))
