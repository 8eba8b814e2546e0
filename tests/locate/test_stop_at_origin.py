"""A replay that stops where the first bad value is made, with the user's frames alive."""

from __future__ import annotations

import linecache
import math
from types import TracebackType

import torch
from torch import Tensor, nn

from stepguard.locate.find_origin import frames_at_origin
from stepguard.records import Reading

from .cases import noise
from .test_bad_micro_batch import step_of

BAD_LOSS = Reading(step=0, loss=math.nan, micro_losses=(math.nan,), grads_finite=False)


def innermost(trace: TracebackType | None) -> TracebackType:
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def test_innermost_frame_is_the_users_line_with_its_variables() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(x: Tensor) -> Tensor:
        out = model(x)
        small = out * 0.0
        return small.log().mean() * 0.0

    trace = frames_at_origin(step_of(loss_fn, model, noise(4, 3)), BAD_LOSS)
    frame = innermost(trace).tb_frame
    assert frame.f_code.co_name == "loss_fn"
    assert not frame.f_locals["small"].any()


def test_handler_of_the_users_does_not_catch_the_stop() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(x: Tensor) -> Tensor:
        try:
            return (model(x) * 0.0).log().mean()
        except Exception:
            return model(x).mean()

    assert frames_at_origin(step_of(loss_fn, model, noise(4, 3)), BAD_LOSS) is not None


def test_bad_gradient_stops_at_the_forward_line_behind_it() -> None:
    model = nn.Linear(3, 1, bias=False)

    def loss_fn(x: Tensor) -> Tensor:
        root = model(x).sum().sqrt()
        return root + model(x).pow(2).mean()

    step = step_of(loss_fn, model, torch.zeros(4, 3))
    reading = Reading(step=0, loss=0.0, micro_losses=(0.0,), grads_finite=False)
    stopped = innermost(frames_at_origin(step, reading))
    assert "root = " in linecache.getline(__file__, stopped.tb_lineno)


def test_clean_step_and_finite_reading_give_no_frames() -> None:
    model = nn.Linear(3, 1)
    step = step_of(lambda x: model(x).mean(), model, noise(4, 3))
    assert frames_at_origin(step, BAD_LOSS) is None
    finite = Reading(step=0, loss=1.0, micro_losses=(1.0,), grads_finite=True)
    assert frames_at_origin(step, finite) is None
