"""The one live tracer of the process, shared by all guards: several cost no more than one."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.bad_op import Invocation
from stepguard.locate.calls import Call
from stepguard.locate.finite import Flaws
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.tracer import EXACT_ELEMENTS, Tracer
from stepguard.state import faked_collectives
from stepguard.tensors.torch_private import TorchDispatchMode, dispatch_mode_stack

MOST_CALLS = 200_000
"""Operations that are remembered; a long validation between two updates must not fill the memory.
"""


class LiveTracer(Tracer):  # type: ignore[no-untyped-call]
    """Traces the user's own step: a fault of the tracer ends the trace, never the step."""

    knows_batch = False

    def __init__(self, modules: ModuleSpans) -> None:
        super().__init__(modules)
        self.fault: Exception | None = None
        self._process = os.getpid()

    @property
    def idle(self) -> bool:
        """True if nothing is recorded: it has failed, it is full, or this is another process."""
        if self.fault is not None or len(self.calls) >= MOST_CALLS:
            return True
        # A worker process of a data loader inherits the mode.
        return os.getpid() != self._process

    @property
    def next_index(self) -> int:
        """Number of the next call."""
        return self.forgotten + len(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Unlike in a replay all ranks take part: collectives run as they are.
        if self.idle:
            return func(*args, **kwargs)
        if func.namespace in faked_collectives.NAMESPACES:
            result = func(*args, **kwargs)
            self._carefully(func.namespace, self._exchange, func, args, result)
            return result
        invocation = None
        try:
            invocation = self._inspect(func, args, kwargs)
        except Exception as fault:
            self.fault = fault
        result = func(*args, **kwargs)
        if invocation is not None:
            try:
                self._record(invocation, result)
            except Exception as fault:
                self.fault = fault
        return result

    def _attribute(self, call: Call, invocation: Invocation, out: Tensor, found: Flaws) -> None:
        # Measuring may run the operation again in a wider dtype: a random one would draw numbers.
        state = torch.get_rng_state()
        try:
            super()._attribute(call, invocation, out, found)
        finally:
            torch.set_rng_state(state)

    def forget_before(self, first: int) -> None:
        """Drop the calls numbered below `first`."""
        dropped = [call for call in self.calls if call.index < first]
        for call in dropped:
            # Calls hold on to their parents: without this the whole past would stay alive.
            call.parents = ()
            call.flawed = ()
            call.causes = ()
        self.calls = self.calls[len(dropped) :]
        self.forgotten += len(dropped)
        self._forget_tensors_before(first)
        self._measured = 0
        self._exact_left = EXACT_ELEMENTS

    def _forget_tensors_before(self, first: int) -> None:
        self._exchanged.clear()
        # The memory of the dropped calls' tensors may belong to other tensors by now.
        for key, maker in list(self._makers.items()):
            if maker.stage != "stored" and maker.index < first:
                del self._makers[key]
        for number, owner in list(self.owners.items()):
            if owner.index < first:
                del self.owners[number]
                self.lines.pop(number, None)
                self._nodes.pop(number, None)
        self.modules.forget_before(min(self.owners, default=0))


class Recorder:
    """Runs the tracer while a guard has a step open and no guard does work of its own."""

    def __init__(self) -> None:
        self.spans = ModuleSpans({})
        self.tracer = LiveTracer(self.spans)
        self.kept: list[Any] = []
        """Steps that may still be asked for; each knows the number of its first call."""
        self._open: list[Any] = []
        """Steps that are being traced, one a guard."""
        self._working_guards: set[int] = set()
        self._entered = ExitStack()
        self._on = False
        self._thread = threading.get_ident()

    def follow_modules(self, roots: dict[str, nn.Module]) -> None:
        """Record calls of these modules, under keys: every guard has names of its own for them."""
        for root in roots.values():
            for module in root.modules():
                self.spans.names.setdefault(id(module), module_key(module))

    def begin(self, step: Any) -> None:
        """Trace one guard's step from here on."""
        self._open.append(step)
        self.kept.append(step)
        self.tracer.forget_before(min(one.first for one in self.kept))
        self._switch()

    def end(self, step: Any) -> None:
        """End a step. What was recorded of it stays until it is released."""
        if step in self._open:
            self._open.remove(step)
        self._switch()

    def release(self, step: Any) -> None:
        """Drop a step; the recorder goes with the last one."""
        self.end(step)
        if step in self.kept:
            self.kept.remove(step)
        if not self.kept:
            _drop(self)

    def set_working(self, guard: int, *, on: bool) -> bool:
        """Begin or end work of a guard's own, which is not recorded; return the state before."""
        before = guard in self._working_guards
        if on:
            self._working_guards.add(guard)
        else:
            self._working_guards.discard(guard)
        self._switch()
        return before

    @property
    def on_this_thread(self) -> bool:
        """True on the thread that made the recorder: dispatch modes belong to one thread."""
        return threading.get_ident() == self._thread

    def _switch(self) -> None:
        wanted = bool(self._open) and not self._working_guards and self.tracer.fault is None
        if wanted == self._on or not self.on_this_thread:
            return
        self._on = wanted
        if not wanted:
            self._entered.close()
            return
        self._entered.enter_context(self.spans)
        self.tracer.__enter__()
        self._entered.callback(leave, self.tracer)


_recorder: Recorder | None = None


def present_recorder() -> Recorder | None:
    """Return the recorder, if a step is being traced."""
    return _recorder


def shared_recorder() -> Recorder | None:
    """Return the recorder of the process, made where there is none; None if it cannot be used."""
    global _recorder
    if _recorder is not None and _recorder.tracer.fault is not None:
        # Its steps get no answer from it any more.
        _recorder = None
    if _recorder is None:
        # Beside another dispatch mode: two that are not nested leave each other on the stack.
        if dispatch_mode_stack():
            return None
        _recorder = Recorder()
    return _recorder if _recorder.on_this_thread else None


def _drop(recorder: Recorder) -> None:
    global _recorder
    if _recorder is recorder:
        _recorder = None


def module_key(module: nn.Module) -> str:
    """Name a module for all guards; each guard has a name of its own for it."""
    return f"#{id(module)}"


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
