"""The one live tracer of the process: all guards that trace share it, so that several do not cost
several times.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from stepguard.locate.bad_op import Invocation
from stepguard.locate.calls import Call
from stepguard.locate.finite import Flaws
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.tracer import EXACT_ELEMENTS, Tracer
from stepguard.state import faked_collectives

MOST_CALLS = 200_000
"""Operations that are remembered; a long validation between two updates must not fill the memory.
"""


class LiveTracer(Tracer):  # type: ignore[no-untyped-call]
    """A tracer that may be wrong but never in the way: a fault of its own ends the trace, not the
    user's step.
    """

    def __init__(self, modules: ModuleSpans) -> None:
        super().__init__(modules)
        self.fault: Exception | None = None
        self._process = os.getpid()

    @property
    def deaf(self) -> bool:
        """Full, broken, or in a data loader's worker process that inherited it."""
        return (
            self.fault is not None or len(self.calls) >= MOST_CALLS or os.getpid() != self._process
        )

    @property
    def seen(self) -> int:
        """Number of the next call."""
        return self.forgotten + len(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.deaf or func.namespace in faked_collectives.NAMESPACES:
            return func(*args, **kwargs)
        seen = None
        try:
            seen = self._inspect(func, args, kwargs)
        except Exception as fault:
            self.fault = fault
        result = func(*args, **kwargs)
        if seen is not None:
            try:
                self._record(seen, result)
            except Exception as fault:
                self.fault = fault
        return result

    def _attribute(self, call: Call, invocation: Invocation, out: Tensor, found: Flaws) -> None:
        # measuring a birth may run the operation again in a wider dtype: a random one must not draw
        state = torch.get_rng_state()
        try:
            super()._attribute(call, invocation, out, found)
        finally:
            torch.set_rng_state(state)

    def forget_before(self, first: int) -> None:
        """Drop the calls numbered below `first`. Their memory may belong to other tensors by now."""
        gone = [call for call in self.calls if call.index < first]
        for call in gone:
            call.parents = call.flawed = call.causes = ()
        self.calls = self.calls[len(gone) :]
        self.forgotten += len(gone)
        self._makers = {
            k: c for k, c in self._makers.items() if c.stage == "stored" or c.index >= first
        }
        self.owners = {number: call for number, call in self.owners.items() if call.index >= first}
        self.lines = {number: line for number, line in self.lines.items() if number in self.owners}
        self.modules.forget_before(min(self.owners, default=0))
        self._measured, self._exact_left = 0, EXACT_ELEMENTS


class Recorder:
    """Records while a guard has a step open and none of them is at work itself."""

    def __init__(self) -> None:
        self.spans = ModuleSpans({})
        self.tracer = LiveTracer(self.spans)
        self.kept: list[Any] = []
        """Steps that may still be asked for; each knows the number of its first call."""
        self._open: list[Any] = []
        """Those that are being traced, one a guard."""
        self._working: set[int] = set()
        self._entered = ExitStack()
        self._on = False
        self._thread = threading.get_ident()

    def know(self, roots: dict[str, nn.Module]) -> None:
        """Follow these modules. They are known by their object; every guard has names of its own."""
        for root in roots.values():
            for module in root.modules():
                self.spans.names.setdefault(id(module), token(module))

    def begin(self, step: Any) -> None:
        """Trace one guard's step from here on."""
        self._open.append(step)
        self.kept.append(step)
        self.tracer.forget_before(min(one.first for one in self.kept))
        self._switch()

    def end(self, step: Any) -> None:
        """The step is over. What was recorded of it stays until it is released."""
        if step in self._open:
            self._open.remove(step)
        self._switch()

    def release(self, step: Any) -> None:
        """Nobody will ask for this step any more."""
        self.end(step)
        if step in self.kept:
            self.kept.remove(step)
        if not self.kept:
            _drop(self)

    def work(self, guard: int, *, on: bool) -> bool:
        """A guard's own operations are not the user's: nothing is recorded while one works. Was it
        at work before?
        """
        before = guard in self._working
        if on:
            self._working.add(guard)
        else:
            self._working.discard(guard)
        self._switch()
        return before

    @property
    def here(self) -> bool:
        """Dispatch modes belong to one thread."""
        return threading.get_ident() == self._thread

    def _switch(self) -> None:
        wanted = bool(self._open) and not self._working and self.tracer.fault is None
        if wanted == self._on or not self.here:
            return
        self._on = wanted
        if not wanted:
            self._entered.close()
            return
        self._entered.enter_context(self.spans)
        self.tracer.__enter__()  # type: ignore[no-untyped-call]
        self._entered.callback(leave, self.tracer)


_recorder: Recorder | None = None


def present_recorder() -> Recorder | None:
    """The recorder, if a step is being traced."""
    return _recorder


def shared_recorder() -> Recorder | None:
    """The recorder of the process, made where there is none; None where it cannot be used here."""
    global _recorder
    if _recorder is not None and _recorder.tracer.fault is not None:
        _recorder = None  # the steps that know it get no answer from it
    if _recorder is None and not _get_current_dispatch_mode_stack():
        # with somebody else's mode there: two that are not nested would leave each other on the
        # stack
        _recorder = Recorder()
    return _recorder if _recorder is not None and _recorder.here else None


def _drop(recorder: Recorder) -> None:
    global _recorder
    if _recorder is recorder:
        _recorder = None


def token(module: nn.Module) -> str:
    """A module's name among all guards; each has a name of its own for it."""
    return f"#{id(module)}"


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
