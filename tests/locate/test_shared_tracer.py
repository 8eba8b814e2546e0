"""The live tracer of the process: on while a step is open, off while a guard works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepguard.locate import live_trace
from stepguard.locate.live_trace import (
    LiveTracer,
    leave,
    module_key,
    present_recorder,
    shared_recorder,
)
from stepguard.locate.source import ModuleSpans
from stepguard.tensors.torch_private import TorchDispatchMode, dispatch_mode_stack


class Traced:
    """Stands for the trace of one step."""

    first = 0


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_recorder_is_one_for_all_and_goes_with_the_last_step() -> None:
    recorder = shared_recorder()
    assert recorder is not None and shared_recorder() is recorder
    one = Traced()
    other = Traced()
    recorder.begin(one)
    recorder.begin(other)
    recorder.release(one)
    assert present_recorder() is recorder
    recorder.release(other)
    assert present_recorder() is None
    assert not dispatch_mode_stack()


def test_work_of_a_guard_is_not_recorded() -> None:
    recorder = shared_recorder()
    assert recorder is not None
    step = Traced()
    recorder.begin(step)
    torch.ones(1).exp()
    assert recorder.set_working(1, on=True) is False
    torch.ones(1).log()
    assert recorder.set_working(1, on=False) is True
    torch.ones(1).sin()
    recorder.release(step)
    seen = [call.op for call in recorder.tracer.calls]
    assert "aten.exp" in seen and "aten.sin" in seen and "aten.log" not in seen


def test_no_recorder_beside_another_dispatch_mode() -> None:
    with Passing():  # type: ignore[no-untyped-call]
        assert shared_recorder() is None


def test_mode_is_taken_from_under_another_one() -> None:
    lower = Passing()  # type: ignore[no-untyped-call]
    lower.__enter__()  # type: ignore[no-untyped-call]
    with Passing() as upper:  # type: ignore[no-untyped-call]
        leave(lower)
        assert list(dispatch_mode_stack()) == [upper]
        leave(lower)
    assert not dispatch_mode_stack()


def test_fault_of_the_tracer_ends_the_trace_and_not_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer = LiveTracer(ModuleSpans({}))
    monkeypatch.setattr(tracer, "_inspect", lambda *arguments: 1 / 0)
    with tracer:
        assert torch.ones(2).sum().item() == 2.0
    assert isinstance(tracer.fault, ZeroDivisionError) and tracer.idle


def test_full_tracer_records_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_trace, "MOST_CALLS", 2)
    tracer = LiveTracer(ModuleSpans({}))
    with tracer:
        torch.ones(2).exp().sin().cos()
    assert len(tracer.calls) == 2


def test_forgotten_calls_free_their_past_and_keep_the_numbers() -> None:
    model = nn.Linear(2, 1)
    spans = ModuleSpans({"": model})
    tracer = LiveTracer(spans)
    with spans, tracer:
        first = model(torch.ones(1, 2))
        middle = tracer.next_index
        second = model(torch.ones(1, 2))
    old = tracer.calls[middle - 1]
    tracer.forget_before(middle)
    assert old.parents == ()
    assert tracer.calls[0].index == middle == tracer.forgotten
    assert tracer.maker_of(first) is None and tracer.maker_of(second) is not None
    assert all(owner.index >= middle for owner in tracer.owners.values())
    assert set(tracer.lines) <= set(tracer.owners)


def test_modules_have_one_key_for_all_guards() -> None:
    recorder = live_trace.Recorder()
    model = nn.Linear(1, 1)
    recorder.follow_modules({"": model})
    recorder.follow_modules({"critic": model})
    assert recorder.spans.names == {id(model): module_key(model)}
