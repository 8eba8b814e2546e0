"""One step of a watched loop under the live tracer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate import live_trace
from stepguard.locate.live_trace import SEEN_LIVE, LiveTracer, leave
from stepguard.records import Origin, Reading
from stepguard.tensors.torch_private import TorchDispatchMode, dispatch_mode_stack

from .cases import noise
from .test_bad_micro_batch import step_of

BAD_LOSS = Reading(step=0, loss=float("nan"), grads_finite=False)


def tracer_of(model: nn.Module) -> LiveTracer:
    return LiveTracer(step_of(lambda batch: batch, model))


def origin_of(model: nn.Module, x: Tensor, factor: float) -> Origin | None:
    step = step_of(lambda batch: batch, model)
    tracer = LiveTracer(step)
    tracer.switch(on=True)
    scaled = x * 1.0
    tracer.model_called({"x": scaled})
    loss = model(scaled).sigmoid().mul(factor).log().mean()
    tracer.before_backward(loss)
    loss.backward()
    tracer.after_backward(ours=True)
    tracer.finish()
    assert not dispatch_mode_stack()
    return tracer.origin(step, BAD_LOSS)


def test_bad_value_of_the_loss_expression_is_named() -> None:
    origin = origin_of(nn.Linear(3, 1), noise(4, 3), 0.0)
    assert origin is not None
    assert (origin.op, origin.phase, origin.method) == ("aten.log", "loss", "live")
    assert origin.source is not None and "test_live_trace.py:" in origin.source
    assert SEEN_LIVE in origin.remarks and origin.reproduced is None


def test_data_that_is_bad_before_the_model_is_called_is_input() -> None:
    x = noise(4, 3)
    x[2, 0] = float("nan")
    origin = origin_of(nn.Linear(3, 1), x, 1.0)
    assert origin is not None and origin.phase == "input"


def test_bad_weight_is_named() -> None:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
    origin = origin_of(model, noise(4, 3), 1.0)
    assert origin is not None
    assert (origin.phase, origin.tensor, origin.module) == ("state", "param:weight", "")


def test_healthy_step_has_no_origin() -> None:
    assert origin_of(nn.Linear(3, 1), noise(4, 3), 1.0) is None


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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
    tracer = tracer_of(nn.Linear(1, 1))
    monkeypatch.setattr(tracer, "_inspect", lambda *arguments: 1 / 0)
    tracer.switch(on=True)
    assert torch.ones(2).sum().item() == 2.0
    tracer.finish()
    assert isinstance(tracer.fault, ZeroDivisionError) and not tracer.calls


def test_full_tracer_records_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_trace, "MOST_CALLS", 2)
    tracer = tracer_of(nn.Linear(1, 1))
    tracer.switch(on=True)
    torch.ones(2).exp().sin().cos()
    tracer.finish()
    assert len(tracer.calls) == 2
