"""After a bad step that could not be placed, a watched loop runs under the tracer, so that the next one can be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stepguard.engine.closure import needs_closure
from stepguard.engine.context import Context, bare_step
from stepguard.locate import locate
from stepguard.locate.live import LiveTrace, busy
from stepguard.records import Origin, Reading
from stepguard.state.step import Step

ARMED_STEPS = 200
"""Steps that are traced after the last bad one; each costs several times an ordinary step."""
SETTLED_PHASES = ("state", "optimizer", "checkpoint")


class Arming:
    """Owns the live trace of one watcher, which tells it about calls of the model and backward passes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._left = 0
        self._running: LiveTrace | None = None
        self._finished: LiveTrace | None = None

    # --- locating ----------------------------------------------------------------------------------------------

    def locate(self, step: Step, reading: Reading) -> Origin:
        """The replay's answer if it is complete, else that of the live trace; if neither is, arm."""
        origin = locate(step, reading, self._context.effort)
        if step.whole or placed(origin) or reading.overflow:
            return origin
        seen = self._finished.origin(step, reading) if self._finished is not None else None
        if seen is not None and (seen.op is not None or seen.tensor is not None):
            self._left = ARMED_STEPS if self._left else 0
            return seen
        self._arm(reading.step)
        return origin

    def _arm(self, step: int) -> None:
        why_not = self._why_not()
        if why_not:
            self._say(step, f"the next bad step cannot be traced: {why_not}")
        elif not self._left:
            self._say(step, f"tracing the next {ARMED_STEPS} steps, slower, so that the next bad one can be placed")
        self._left = 0 if why_not else ARMED_STEPS

    def _why_not(self) -> str:
        if needs_closure(self._context.optimizer):
            return "the optimizer evaluates the loss several times a step"
        if _anything_compiled():
            return "compiled code runs in this process, and tracing would replace it by other arithmetic"
        return ""

    def _say(self, step: int, summary: str) -> None:
        self._context.note("note", {"step": step, "kind": "tracing", "summary": summary})
        self._context.terminal.note(summary, step, "tracing")

    # --- around the user's code --------------------------------------------------------------------------------

    def begin(self) -> None:
        """An update is done: everything up to the next one is the next step."""
        if not self._left:
            return
        self._left -= 1
        if not self._left:
            self._finished = None
            self._say(self._context.step, f"no longer tracing: {ARMED_STEPS} steps without another bad one")
        elif not busy():
            self._running = LiveTrace(bare_step(self._context))
            self._running.enter()

    def pause(self) -> None:
        """Before work of the guard's own."""
        if self._running is not None:
            self._running.exit()

    def finish(self) -> None:
        """The gradients are there: this step's trace is complete, and that of the step before is of no more use."""
        self._finished, self._running = self._running, None
        if self._finished is not None:
            self._finished.finish()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work of the guard's own in the middle of the user's step."""
        self.pause()
        try:
            yield
        finally:
            if self._running is not None:
                self._running.enter()

    def close(self) -> None:
        self.pause()
        self._running, self._finished, self._left = None, None, 0

    def model_called(self, arguments: Mapping[str, Any]) -> None:
        if self._running is not None:
            with self.paused():
                self._running.model_called(arguments)

    def before_backward(self, root: Tensor) -> None:
        if self._running is not None:
            self._running.before_backward(root)

    def after_backward(self, root: Tensor) -> None:
        if self._running is not None:
            self._running.after_backward(root)


def placed(origin: Origin) -> bool:
    """Is there nothing a trace could add?"""
    if origin.phase in SETTLED_PHASES or (origin.phase == "input" and origin.tensor is not None):
        return True
    return origin.op is not None and origin.source is not None


def _anything_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
