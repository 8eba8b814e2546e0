"""Trace the user's own step as it runs: forward, loss and backward, with every line.

For a watched loop whose bad value is made where no replay reaches. Every operation and every
collective runs exactly once, as it would have, and the random numbers are left alone. One guard of
the process traces at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from stepguard.diagnose.source_line import name_operands
from stepguard.locate.blame import FirstBad, blame_gradients, blame_loss
from stepguard.locate.evidence import first_bad_micro_batch, kept_tensors
from stepguard.locate.operands import Call, batch_tensors, plain
from stepguard.locate.origins import origin_of
from stepguard.locate.source import ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.records.incident import Origin, Reading
from stepguard.state.batch import Step
from stepguard.tensors.names import named_buffers, named_parameters
from stepguard.tensors.torch_private import TorchDispatchMode, dispatch_mode_stack

SEEN_LIVE = "observed live: the step ran under the tracer"

MOST_CALLS = 200_000
"""Operations that are remembered; a long validation between two updates must not fill the memory.
"""


class LiveTracer(Tracer):  # type: ignore[no-untyped-call]
    """Traces one step of a watched loop, from the end of one update to the beginning of the next.

    A fault of the tracer ends the trace, never the step.
    """

    alone = False

    def __init__(self, step: Step) -> None:
        roots = step.named_roots()
        super().__init__(ModuleSpans(roots))
        self._place = (os.getpid(), threading.get_ident())
        self._entered = ExitStack()
        self._on = False
        self._parameters = dict(named_parameters(roots))
        for name, tensor in kept_tensors(roots):
            self.store(name, tensor)
        for name, parameter in self._parameters.items():
            self.store(f"param:{name}", parameter)
        for name, buffer in named_buffers(roots):
            self.store(f"buffer:{name}", buffer)
        self._losses: list[Call] = []
        self._root: Call | None = None
        """Maker of what the present backward starts from."""
        self._gradients: list[Call] = []
        self._first_model_call: int | None = None

    # --- what is recorded

    def switch(self, on: bool) -> None:
        """Record from here on, or no more. Dispatch modes belong to one thread."""
        on = on and self.fault is None
        if on == self._on or self._place[1] != threading.get_ident():
            return
        self._on = on
        if not on:
            self._entered.close()
            return
        self._entered.enter_context(self.modules)
        self.__enter__()
        self._entered.callback(leave, self)

    @property
    def _idle(self) -> bool:
        """True if nothing is recorded: it has failed, it is full, or this is another process."""
        if self.fault is not None or len(self.calls) >= MOST_CALLS:
            return True
        # A worker process of a data loader inherits the mode.
        return os.getpid() != self._place[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._idle:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def enter_module(self, args: Any) -> None:
        """What a part of the model is called with was made before it, by whomever."""
        super().enter_module(args)
        if self._active and not self._idle:
            self._carefully("forward", self._read_all, args)

    # --- what the loop does

    def model_called(self, arguments: Mapping[str, Any]) -> None:
        """Name the batch: what the model is called with, unless an operation made it."""
        if self._first_model_call is None:
            self._first_model_call = len(self.calls)
        for name, tensor in batch_tensors(dict(arguments)):
            maker = self.maker_of(tensor)
            if maker is None or (maker.stage == "stored" and maker.op == "constant"):
                self.store(name, tensor)

    def before_backward(self, root: Tensor) -> None:
        """Note what the backward starts from: a single number is taken for the loss."""
        self._root = self.maker_of(root) if root.numel() == 1 else None
        self.stage = "backward"

    def after_backward(self, *, ours: bool) -> None:
        """Note the loss. `ours`: the backward reached this guard's parameters."""
        if ours and self._root is not None:
            self._losses.append(self._root)
        self.stage = "forward"

    def finish(self) -> None:
        """End the recording; remember who made the gradients, before the guard hides them."""
        self.switch(on=False)
        gradients = [plain(p.grad) for p in self._parameters.values() if p.grad is not None]
        self.settle_gradients(gradients)
        for gradient in gradients:
            maker = self.maker_of(gradient)
            if maker is not None:
                self._gradients.append(maker)

    # --- what it shows

    def origin(self, step: Step, reading: Reading) -> Origin | None:
        """Locate the first harmful value; None if the trace does not show it."""
        found = self._blame()
        if found is None or self.fault is not None:
            return None
        step = replace(step, micro_batches=step.micro_batches or ({},), scale=1.0)
        origin = origin_of(found, self, step)
        read = found.consumer
        if origin.phase == "loss" and read is not None and read.stage == "forward":
            early = read.module is None and read.index < (self._first_model_call or 0)
            if early and found.call.stage == "stored":
                # Data that was bad when it came in; what the loop computes of it is no input.
                origin = replace(origin, phase="input")
        origin = replace(
            origin,
            method="live",
            reproduced=None,
            micro_batch=first_bad_micro_batch(reading),
            remarks=(*origin.remarks, SEEN_LIVE),
        )
        return name_operands(origin)

    def _blame(self) -> FirstBad | None:
        losses = [call for call in self._losses if call.out]
        if losses:
            return blame_loss(self, losses)
        return blame_gradients(self, [call for call in self._gradients if call.out])


def leave(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack wherever it is: the user's code may have entered others since."""
    stack = list(dispatch_mode_stack())
    if mode not in stack:
        return
    # torch can only pop the topmost mode: take those above off, and put them back.
    above = stack[stack.index(mode) + 1 :]
    for other in reversed(above):
        other.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for other in above:
        other.__enter__()  # type: ignore[no-untyped-call]
