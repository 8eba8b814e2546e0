"""The user's own step under the op tracer, as it runs: forward, loss and backward, with every line.

For a watched loop whose bad value was born where no replay reaches. It only looks: every operation and every
collective runs exactly once, as it would have, and the random numbers are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from stepguard.locate import batch as batches
from stepguard.locate.attributes import kept_tensors
from stepguard.locate.birth import Invocation
from stepguard.locate.build import origin_of
from stepguard.locate.calls import Call
from stepguard.locate.finite import Flaws, plain
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.replay import Ran, Replayer, Traced
from stepguard.locate.tracer import Tracer
from stepguard.locate.walk import Found, Walk
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state import collectives
from stepguard.state.step import Step

MOST_CALLS = 200_000
"""Operations of one step that are remembered; a long validation between two updates must not fill the memory."""
SEEN_LIVE = "seen as it happened: the step ran under the tracer"


class LiveTracer(Tracer):  # type: ignore[no-untyped-call]
    """A tracer that may be wrong but never in the way: a fault of its own ends the trace, not the user's step."""

    def __init__(self, modules: ModuleSpans) -> None:
        super().__init__(modules)
        self.fault: Exception | None = None
        self._process = os.getpid()

    @property
    def deaf(self) -> bool:
        """Full, broken, or in a data loader's worker process that inherited it."""
        return self.fault is not None or len(self.calls) >= MOST_CALLS or os.getpid() != self._process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.deaf or func.namespace in collectives.NAMESPACES:
            return func(*args, **kwargs)
        seen = None
        try:
            seen = self._look(func, args, kwargs)
        except Exception as fault:
            self.fault = fault
        result = func(*args, **kwargs)
        if seen is not None:
            try:
                self._record(seen, result)
            except Exception as fault:
                self.fault = fault
        return result

    def _judge(self, call: Call, made_by: Invocation, out: Tensor, found: Flaws) -> None:
        # measuring a birth may run the operation again in a wider dtype: a random one must not draw
        state = torch.get_rng_state()
        try:
            super()._judge(call, made_by, out, found)
        finally:
            torch.set_rng_state(state)


class LiveTrace:
    """One step of a watched loop, from the end of one update to the beginning of the next."""

    def __init__(self, step: Step) -> None:
        roots = step.named_roots()
        self._spans = ModuleSpans(roots)
        self.tracer = LiveTracer(self._spans)
        self._parameters = {
            f"{prefix}.{name}".strip("."): p for prefix, root in roots.items() for name, p in root.named_parameters()
        }
        for name, tensor in kept_tensors(roots):
            self.tracer.store(name, tensor)
        for name, parameter in self._parameters.items():
            self.tracer.store(f"param:{name}", parameter)
        for prefix, root in roots.items():
            for name, buffer in root.named_buffers():
                self.tracer.store(f"buffer:{f'{prefix}.{name}'.strip('.')}", buffer)
        self._losses: list[Call] = []
        self._gradients: list[Call] = []
        self._first_model_call: int | None = None
        self._entered = ExitStack()

    # --- while the user's code runs ----------------------------------------------------------------------------

    def enter(self) -> None:
        self._entered.enter_context(self._spans)
        self.tracer.__enter__()  # type: ignore[no-untyped-call]
        self._entered.callback(leave, self.tracer)

    def exit(self) -> None:
        self._entered.close()

    def model_called(self, arguments: Mapping[str, Any]) -> None:
        """The batch is what the model is called with, unless an operation of this step made it."""
        if self._first_model_call is None:
            self._first_model_call = len(self.tracer.calls)
        for name, tensor in batches.named_tensors(dict(arguments)):
            if self.tracer.maker_of(tensor) is None:
                self.tracer.store(name, tensor)

    def before_backward(self, root: Tensor) -> None:
        maker = self.tracer.maker_of(root) if root.numel() == 1 else None
        if maker is not None:
            self._losses.append(maker)
        self.tracer.stage = "backward"

    def after_backward(self, root: Tensor) -> None:
        self.tracer.stage = "forward"

    def finish(self) -> None:
        """The gradients are complete: remember who made them, before the guard hides them."""
        self.exit()
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        makers = [self.tracer.maker_of(plain(grad)) for grad in grads]
        self._gradients = [maker for maker in makers if maker is not None]

    # --- afterwards --------------------------------------------------------------------------------------------

    def origin(self, step: Step, reading: Reading) -> Origin | None:
        """Where the first harmful value was born; None when the trace does not show it."""
        found = self._walk()
        if found is None or self.tracer.fault is not None:
            return None
        step = replace(step, micro_batches=step.micro_batches or ({},), scale=1.0)
        traced = Traced(Ran(loss_finite=not _bad(self._losses)), self.tracer, 0)
        origin = origin_of(found, traced, Replayer(step, step.buffers))
        if origin.phase == "loss" and self._before_the_model(found.consumer or found.birth):
            origin = replace(origin, phase="input")
        micro = reading.bad_micro_batches[0] if reading.bad_micro_batches else None
        return replace(origin, method="live", reproduced=None, micro_batch=micro, notes=(*origin.notes, SEEN_LIVE))

    def _walk(self) -> Found | None:
        losses, gradients = _bad(self._losses), _bad(self._gradients)
        if losses:
            return Walk(self.tracer, losses).from_loss()
        return Walk(self.tracer, gradients).from_gradients() if gradients else None

    def _before_the_model(self, call: Call) -> bool:
        first = self._first_model_call
        return call.stage == "forward" and call.module is None and first is not None and call.index < first


def _bad(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.out]


def busy() -> bool:
    """Is somebody else's dispatch mode active? Two that are not nested would leave each other on the stack."""
    return bool(_get_current_dispatch_mode_stack())


def leave(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack wherever it is: the user's code may have entered others since."""
    stack = list(_get_current_dispatch_mode_stack())
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for other in reversed(above):
        other.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for other in above:
        other.__enter__()  # type: ignore[no-untyped-call]
