"""After a bad step that could not be located, a watched loop runs under the tracer, so that the
next one can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from stepguard.engine.context import Context, bare_step
from stepguard.engine.drivers.schedule import ScheduleCopy, needs_closure, position
from stepguard.locate import locate
from stepguard.locate.live_trace import LiveTracer
from stepguard.records import Origin, Reading
from stepguard.records.incident import Evidence, with_evidence
from stepguard.state.batch import Step
from stepguard.tensors.torch_private import (
    dispatch_mode_stack,
    graphs_compiled,
    pretend_stepped,
)

# --- After a bad step that could not be located, a watched loop runs under the tracer, so that the
# next one can be.


ARMED_STEPS = 40
"""Steps after the last bad one during which the loop is traced."""
MOST_FUTILE = 3
"""Traced bad steps whose place the trace did not show either, after which no more are traced."""
TRACING_STEPS = 20.0
"""Tracing a loop may add this many times the budget of locating one incident."""
TRACING_FLOOR = 5.0
"""Seconds that tracing may add in any case."""
COMPILED = "compiled code runs in this process, and tracing would replace it by other arithmetic"
WATCH_THE_COMPILED = (
    ". No call of the model was observed: give stepguard.watch what torch.compile returned, and "
    "bad values that originate in the model are located by a replay"
)
ANOTHER_TRACES = "another guard of this process is tracing, and only one can at a time"
SETTLED_PHASES = ("state", "optimizer", "checkpoint")


class LiveTracing:
    """Says which steps of one watcher are traced, and tells their trace about calls of the model
    and backward passes.
    """

    armed: ClassVar[LiveTracing | None] = None
    """The one of the process whose steps are traced."""
    working: ClassVar[set[int]] = set()
    """Guards that are doing work of their own, which belongs to nobody's step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: int | None = None
        """Steps since the loop is to be traced; None while it is not."""
        self._futile = 0
        self._why_last = ""
        """Why the last bad step was followed by no trace: said once."""
        self._running: LiveTracer | None = None
        self._finished: LiveTracer | None = None

    @property
    def idle(self) -> bool:
        """Is no step of this watcher traced, and none to be?"""
        return self._since is None and self._running is None and self._finished is None

    # --- locating

    def locate(self, step: Step, reading: Reading) -> Origin:
        """Take the replay's answer if it is complete, else the live trace's; else trace on."""
        origin = locate(step, reading, self._context.memory.effort)
        if step.replayable or placed(origin) or reading.overflow:
            return origin
        seen = self._finished.origin(step, reading) if self._finished is not None else None
        if seen is not None and (seen.op is not None or seen.tensor is not None):
            self._since = 0 if self._since is not None else None
            return seen
        self._futile += self._finished is not None
        self._arm(reading.step, unheard=not step.micro_batches)
        if self._context.sharded or needs_closure(self._context.optimizer):
            return origin
        return with_evidence(origin, Evidence(loss_unseen=True))

    def _arm(self, step: int, *, unheard: bool = False) -> None:
        """`unheard`: no call of the model was heard either."""
        why_not = self._why_not(unheard)
        if why_not and why_not != self._why_last:
            self._say(step, f"the next bad step cannot be traced: {why_not}")
        elif not why_not and self._since is None:
            which = f"the next {ARMED_STEPS} steps, slower"
            self._say(step, f"tracing {which}, so that the next bad one can be located")
        self._why_last = why_not
        self._disarm()
        if not why_not:
            self._since = 0
            LiveTracing.armed = self
            LiveTracing.working = {id(self)}
        self._context.memory.effort.added_by_tracing = 0.0

    def _disarm(self) -> None:
        self._since = None
        if LiveTracing.armed is self:
            LiveTracing.armed = None

    def _why_not(self, unheard: bool) -> str:
        if needs_closure(self._context.optimizer):
            return "the optimizer evaluates the loss several times a step"
        if self._context.sharded:
            return "parameters are sharded over ranks"
        if graphs_compiled():
            return COMPILED + (WATCH_THE_COMPILED if unheard else "")
        if LiveTracing.armed not in (None, self):
            return ANOTHER_TRACES
        if self._futile >= MOST_FUTILE:
            return f"{self._futile} bad steps were traced, and none of them showed the origin"
        return ""

    def _say(self, step: int, summary: str) -> None:
        self._context.outputs.note("tracing", summary, step=step)

    # --- around the user's code

    def begin(self) -> None:
        """An update is done: everything up to the next one is the next step."""
        effort = self._context.memory.effort
        effort.tracing = False
        if self._since is not None:
            self._since += 1
            steps = TRACING_STEPS * effort.steps
            over = ""
            if self._since > ARMED_STEPS:
                over = f"{ARMED_STEPS} steps without another bad one"
            elif effort.added_by_tracing > max(TRACING_FLOOR, steps * effort.bare_seconds):
                over = f"it has taken as long as {steps:g} more steps"
            if over:
                self._disarm()
                self._finished = None
                self._say(self._context.step, f"no longer tracing: {over}")
            elif not dispatch_mode_stack():
                # Two dispatch modes that are not nested would leave each other on the stack.
                self._running = LiveTracer(bare_step(self._context))
                effort.tracing = True
        self._work(on=False)

    def pause(self) -> None:
        """Before work of this guard's own, which belongs to nobody's step."""
        self._work(on=True)

    def _work(self, *, on: bool) -> None:
        if on:
            self.working.add(id(self))
        else:
            self.working.discard(id(self))
        tracing = LiveTracing.armed
        if tracing is not None and tracing._running is not None:
            tracing._running.switch(on=not self.working)

    def finish(self) -> None:
        """The gradients are there: this step's trace is complete, and that of the step before is of
        no more use.
        """
        self._finished = self._running
        self._running = None
        if self._finished is not None:
            self._finished.finish()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work of the guard's own in the middle of the user's step."""
        already = id(self) in self.working
        self._work(on=True)
        try:
            yield
        finally:
            self._work(on=already)

    def close(self) -> None:
        if self._running is not None:
            self._running.switch(on=False)
        self._running = None
        self._finished = None
        self._disarm()
        self._work(on=False)

    def model_called(self, arguments: Mapping[str, Any]) -> None:
        if self._running is not None:
            with self.paused():
                self._running.model_called(arguments)

    def before_backward(self, root: Tensor) -> None:
        if self._running is not None:
            self._running.before_backward(root)

    def after_backward(self, *, ours: bool) -> None:
        if self._running is not None:
            self._running.after_backward(ours=ours)


def placed(origin: Origin) -> bool:
    """Is there nothing a trace could add?"""
    if origin.phase in SETTLED_PHASES or (origin.phase == "input" and origin.tensor is not None):
        return True
    return origin.op is not None and origin.source is not None


# --- Take back what a watched loop does to its schedule and scaler after a vetoed update.


class ScheduleRollback:
    """Schedule and scaler of one guard, from a vetoed update to the next one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._copy: ScheduleCopy | None = None
        self._seen: tuple[int, ...] | None = None
        self.every_step = True
        """False for a schedule that moves once an epoch: it does not count updates."""
        self.scaler = False
        """The scaler's next update must leave it as it is."""
        self._went_through = True

    def vetoed(self) -> None:
        """Inside optimizer.step(): what the loop does next counts as not done."""
        context = self._context
        if context.scheduler is not None:
            self._copy = ScheduleCopy(context.scheduler, context.optimizer)
            # where the scaler never called it: torch would warn of a schedule that moves before the
            # first update
            pretend_stepped(context.optimizer)
        self.scaler = context.scaling()

    def scaler_skipped(self) -> None:
        """Learn nothing from this step: careful loops leave their schedule alone after it."""
        self._went_through = False

    def moved(self) -> bool:
        """Has the loop moved the schedule since the last update?"""
        scheduler = self._context.scheduler
        if scheduler is None or self._seen is None:
            return True
        return position(scheduler) != self._seen

    def take_back(self, moved: bool | None = None) -> None:
        """Take back what the loop did after a veto; else learn from whether it `moved`."""
        if self._copy is None and moved is not None and self._went_through:
            self.every_step = moved
        if self._copy is not None and self.every_step:
            self._copy.restore()
        self._copy = None
        self.scaler = False
        self._went_through = True
        if self._context.scheduler is not None:
            self._seen = position(self._context.scheduler)
