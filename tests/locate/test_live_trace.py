"""One step of a watched loop under the live tracer, in one guard's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate.live_trace import (
    SEEN_LIVE,
    LiveTrace,
    OwnSpans,
    Recorder,
    module_key,
    present_recorder,
    shared_recorder,
)
from stepguard.records import Reading

from .cases import noise
from .test_bad_micro_batch import step_of

BAD_LOSS = Reading(step=0, loss=float("nan"), grads_finite=False)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    shared = shared_recorder()
    assert shared is not None
    yield shared
    assert present_recorder() is None


def traced(recorder: Recorder, model: nn.Module, x: Tensor, factor: float) -> LiveTrace:
    step = step_of(lambda batch: batch, model)
    trace = LiveTrace(step, recorder)
    trace.enter()
    scaled = x * 1.0
    trace.model_called({"x": scaled})
    loss = model(scaled).sigmoid().mul(factor).log().mean()
    trace.before_backward(loss)
    loss.backward()
    trace.after_backward(ours=True)
    trace.finish()
    return trace


def test_bad_value_of_the_loss_expression_is_named(recorder: Recorder) -> None:
    model = nn.Linear(3, 1)
    trace = traced(recorder, model, noise(4, 3), 0.0)
    origin = trace.origin(step_of(lambda batch: batch, model), BAD_LOSS)
    trace.release()
    assert origin is not None
    assert (origin.op, origin.phase, origin.method) == ("aten.log", "loss", "live")
    assert origin.source is not None and "test_live_trace.py:" in origin.source
    assert SEEN_LIVE in origin.remarks and origin.reproduced is None


def test_data_that_is_bad_before_the_model_is_called_is_input(recorder: Recorder) -> None:
    model = nn.Linear(3, 1)
    x = noise(4, 3)
    x[2, 0] = float("nan")
    trace = traced(recorder, model, x, 1.0)
    origin = trace.origin(step_of(lambda batch: batch, model), BAD_LOSS)
    trace.release()
    assert origin is not None and origin.phase == "input"


def test_bad_weight_has_the_name_of_this_guard(recorder: Recorder) -> None:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
    trace = traced(recorder, model, noise(4, 3), 1.0)
    origin = trace.origin(step_of(lambda batch: batch, model), BAD_LOSS)
    trace.release()
    assert origin is not None
    assert (origin.phase, origin.tensor, origin.module) == ("state", "param:weight", "")


def test_healthy_step_has_no_origin(recorder: Recorder) -> None:
    model = nn.Linear(3, 1)
    trace = traced(recorder, model, noise(4, 3), 1.0)
    assert trace.origin(step_of(lambda batch: batch, model), BAD_LOSS) is None
    trace.release()


def test_spans_are_spelled_in_one_guards_names() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    criterion = nn.MSELoss()
    foreign = nn.Linear(1, 1)
    recorded = Recorder().spans
    spans = OwnSpans({"": model, "criterion": criterion}, recorded)
    assert spans.spelled(module_key(model[0])) == "0"
    assert spans.spelled(module_key(foreign)) is None
    assert spans.spelled(None) is None
    assert spans.belongs_to_model(module_key(model[0]))
    assert not spans.belongs_to_model(module_key(criterion))
