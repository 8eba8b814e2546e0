"""After a bad step that could not be placed, a watched loop runs under the tracer, so that the next
one can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stepguard.engine.context import Context, bare_step
from stepguard.engine.drivers.schedule import ScheduleCopy, needs_closure, position
from stepguard.locate import locate
from stepguard.locate.live_trace import LiveTrace, present_recorder, shared_recorder
from stepguard.records import Origin, Reading
from stepguard.records.incident import Evidence, with_evidence
from stepguard.state.batch import Step
from stepguard.tensors.torch_private import graphs_compiled, pretend_stepped

# --- After a bad step that could not be placed, a watched loop runs under the tracer, so that the
# next one can be.


ARMED_STEPS = 200
"""Steps after the last bad one during which the loop is traced, each of the first ones, then some.
"""
IN_A_ROW = 20
THEN_EVERY = 10
MOST_FUTILE = 3
"""Traced bad steps whose place the trace did not show either, after which no more are traced."""
COMPILED = "compiled code runs in this process, and tracing would replace it by other arithmetic"
WATCH_THE_COMPILED = (
    ". No call of the model was heard: give stepguard.watch what torch.compile returned, and bad "
    "values born in the "
    "model are placed by a replay"
)
SETTLED_PHASES = ("state", "optimizer", "checkpoint")


class LiveTracing:
    """Says which steps of one watcher are traced, and tells their trace about calls of the model
    and backward passes.

    The tracer itself is one for all guards of the process (locate/shared_tracer).
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: int | None = None
        """Steps since the loop is to be traced; None while it is not."""
        self._futile = 0
        self._running: LiveTrace | None = None
        self._finished: LiveTrace | None = None

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
        if why_not:
            self._say(step, f"the next bad step cannot be traced: {why_not}")
        elif self._since is None:
            which = f"the next {IN_A_ROW} steps, then every {THEN_EVERY}th up to {ARMED_STEPS}"
            self._say(step, f"tracing {which}, slower, so that the next bad one can be placed")
        self._since = None if why_not else 0
        self._context.memory.effort.begin_tracing()

    def _why_not(self, unheard: bool) -> str:
        if needs_closure(self._context.optimizer):
            return "the optimizer evaluates the loss several times a step"
        if self._context.sharded:
            return "parameters are sharded over ranks"
        if graphs_compiled():
            return COMPILED + (WATCH_THE_COMPILED if unheard else "")
        if self._futile >= MOST_FUTILE:
            return (
                f"{self._futile} bad steps were traced, and none of them showed where it was born"
            )
        return ""

    def _say(self, step: int, summary: str) -> None:
        self._context.outputs.note("tracing", summary, step=step)

    # --- around the user's code

    def begin(self) -> None:
        """An update is done: everything up to the next one is the next step."""
        if self._since is None:
            trace = None
        else:
            self._since += 1
            limit = self._context.memory.effort
            if self._since >= ARMED_STEPS:
                self._disarm(f"{ARMED_STEPS} steps without another bad one")
                trace = None
            elif limit.tracing_too_long:
                self._disarm(f"it has taken as long as {limit.tracing_limit:g} more steps")
                trace = None
            elif self._since > IN_A_ROW and self._since % THEN_EVERY:
                trace = None
            else:
                recorder = shared_recorder()
                if recorder is None:
                    trace = None
                else:
                    self._working(on=True)  # the first one to trace has just made the recorder
                    trace = LiveTrace(bare_step(self._context), recorder)
        self._context.memory.effort.tracing = trace is not None
        self._running = trace
        if trace is not None:
            trace.enter()
        self._working(on=False)

    def _disarm(self, why: str) -> None:
        self._since = None
        self._let_go()
        self._say(self._context.step, f"no longer tracing: {why}")

    def _let_go(self) -> None:
        """Of the trace of the step before."""
        if self._finished is not None:
            self._finished.release()
        self._finished = None

    def pause(self) -> None:
        """Before work of this guard's own, which belongs to nobody's step."""
        self._working(on=True)

    def _working(self, *, on: bool) -> bool:
        recorder = present_recorder()
        if recorder is None:
            return False
        return recorder.set_working(id(self), on=on)

    def finish(self) -> None:
        """The gradients are there: this step's trace is complete, and that of the step before is of
        no more use.
        """
        self._let_go()
        self._finished = self._running
        self._running = None
        if self._finished is not None:
            self._finished.finish()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work of the guard's own in the middle of the user's step."""
        already = self._working(on=True)
        try:
            yield
        finally:
            self._working(on=already)

    def close(self) -> None:
        self._let_go()
        if self._running is not None:
            self._running.release()
        self._running = None
        self._since = None
        self._working(on=False)

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
