"""Standing where the bad value is born: the step runs again and stops there, with the user's frames
alive.
"""

from __future__ import annotations

from itertools import pairwise
from types import TracebackType
from typing import Any

from stepguard.locate.bad_micro_batch import bad_micro_batch
from stepguard.locate.blame import Found
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
    """Raised in the operation to stop at. Not an Exception: no handler of the user's may stop it."""


class StoppingTracer(Tracer):  # type: ignore[no-untyped-call]
    """Records like any other, and raises once the operation of this number has run."""

    def __init__(self, modules: ModuleSpans, last: int) -> None:
        super().__init__(modules)
        self._last = last

    def _record(self, *seen: Any) -> None:
        super()._record(*seen)
        if len(self.calls) > self._last:
            raise ReachedError


class StoppingReplayer(Replayer):
    """Traces with a StoppingTracer."""

    last = 0

    def tracer(self, spans: ModuleSpans) -> Tracer:
        return StoppingTracer(spans, self.last)


def frames_at_birth(step: Step, reading: Reading) -> TracebackType | None:
    """The user's frames at the origin, innermost last; for a backward origin, at the forward line
    behind it.

    None where no frame of the user's is involved: the optimizer made it, or the replay is clean.
    """
    if (
        finite_step(reading)
        or reading.state_born
        or no_replay(step) is not None
        or not step.replayable
    ):
        return None
    with untouched(step) as keeper:
        stopping = StoppingReplayer(step, keeper)
        try:
            place = _place(Replayer(step, keeper), reading)
            if place is not None:
                micro, stopping.last = place
                stopping.clear_gradients()
                stopping.trace(micro)
        except ReplayError:
            return None
        except ReachedError as reached:
            return _users_only(reached.__traceback__)
    return None


def _place(replayer: Replayer, reading: Reading) -> tuple[int, int] | None:
    """Micro-batch and number of the operation to stop after."""
    micro = bad_micro_batch(replayer, reading)
    if micro is None:
        return None
    traced, found = search(replayer, micro, replayer.step.micro_batches[micro])
    call = _forward_call(traced, found) if found is not None else None
    return (micro, call.index) if call is not None else None


def _forward_call(traced: Traced, found: Found) -> Call | None:
    call: Call | None = found.birth
    if call is not None and (call.stage == "stored" or call.blank):
        call = found.consumer
    if call is not None and call.stage == "backward":
        call = traced.tracer.owners.get(call.sequence)
    return call


def _users_only(trace: TracebackType | None) -> TracebackType | None:
    """The same trace without the frames of torch and stepguard in it."""
    kept = []
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    for outer, inner in pairwise([*kept, None]):
        if outer is not None:
            outer.tb_next = inner
    return kept[0] if kept else None
