"""Replay a step and stop where its first bad value is made, with the user's frames alive."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from stepguard.locate.bad_micro_batch import bad_micro_batch
from stepguard.locate.bad_op import Invocation
from stepguard.locate.blame import FirstBad
from stepguard.locate.calls import Call
from stepguard.locate.find_origin import finite_step, no_replay, search
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.replay import Replayer, ReplayError, Traced
from stepguard.locate.source import is_users
from stepguard.locate.tracer import Tracer
from stepguard.records.reading import Reading
from stepguard.state.isolation import untouched
from stepguard.state.step import Step


class ReachedError(BaseException):
    """Raised in the operation to stop at. A BaseException: the user's handlers do not catch it."""


class StoppingTracer(Tracer):  # type: ignore[no-untyped-call]
    """Records calls, and raises ReachedError once the operation of this number has run."""

    def __init__(self, modules: ModuleSpans, last: int) -> None:
        super().__init__(modules)
        self._last = last

    def _record(self, invocation: Invocation, result: Any) -> None:
        super()._record(invocation, result)
        if len(self.calls) > self._last:
            raise ReachedError


class StoppingReplayer(Replayer):
    """Traces with a StoppingTracer."""

    last = 0
    """Number of the operation to stop after."""

    def new_tracer(self, spans: ModuleSpans) -> Tracer:
        return StoppingTracer(spans, self.last)


def frames_at_origin(step: Step, reading: Reading) -> TracebackType | None:
    """Return the user's frames at the origin, innermost last; of a backward origin, its forward's.

    None where no frame of the user's is involved: the optimizer made it, or the replay is clean.
    """
    if finite_step(reading) or reading.state_born:
        return None
    if not step.replayable or no_replay(step) is not None:
        return None
    with untouched(step) as keeper:
        stopping = StoppingReplayer(step, keeper)
        try:
            stop = _where_to_stop(Replayer(step, keeper), reading)
            if stop is not None:
                micro, stopping.last = stop
                stopping.clear_gradients()
                stopping.trace(micro)
        except ReplayError:
            return None
        except ReachedError as reached:
            return _users_only(reached.__traceback__)
    return None


def _where_to_stop(replayer: Replayer, reading: Reading) -> tuple[int, int] | None:
    """Return the micro-batch and the number of the operation to stop after."""
    micro = bad_micro_batch(replayer, reading)
    if micro is None:
        return None
    traced, found = search(replayer, micro, replayer.step.micro_batches[micro])
    if found is None:
        return None
    call = _forward_call(traced, found)
    if call is None:
        return None
    return micro, call.index


def _forward_call(traced: Traced, found: FirstBad) -> Call | None:
    call: Call | None = found.call
    if found.call.stage == "stored" or found.call.uninitialised:
        call = found.consumer
    if call is not None and call.stage == "backward":
        # No frame of the user's is alive in the backward: stop where the node was created.
        call = traced.tracer.owners.get(call.sequence)
    return call


def _users_only(trace: TracebackType | None) -> TracebackType | None:
    """Take the frames of torch and stepguard out of a traceback."""
    kept = []
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    inner = None
    for entry in reversed(kept):
        entry.tb_next = inner
        inner = entry
    return inner
