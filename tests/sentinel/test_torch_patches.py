"""Wrapped torch functions: what listeners are told, and that everything is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel

from stepguard.sentinel import torch_patches


class Recorder:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.veto_average = False

    def before_backward(self, root: Tensor) -> None:
        self.told.append(("before", torch_patches.inside_backward()))

    def after_backward(self, root: Tensor, *, failed: bool) -> None:
        self.told.append(("after", failed))

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        self.told.append(("norm", len(tensors), float(norm)))

    def after_load(self) -> None:
        self.told.append("load")

    def around_update(
        self, scaler: GradScaler, update: Callable[[Any], None], new_scale: Any
    ) -> None:
        self.told.append("update")
        update(new_scale)

    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None:
        self.told.append("scaled step")

    def averages_nothing(self, average: AveragedModel, model: Any) -> bool:
        self.told.append("average")
        return self.veto_average


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    listener = Recorder()
    stop = torch_patches.listen(listener)
    yield listener
    stop()


def test_originals_are_back_when_the_last_listener_stops() -> None:
    before = (torch.Tensor.backward, clip_grad._get_total_norm, GradScaler.update)
    listeners = [Recorder(), Recorder()]
    stops = [torch_patches.listen(listener) for listener in listeners]
    stops[0]()
    assert torch.Tensor.backward is not before[0]
    stops[1]()
    stops[1]()
    assert (torch.Tensor.backward, clip_grad._get_total_norm, GradScaler.update) == before


def test_a_backward_is_told_before_and_after(recorder: Recorder) -> None:
    number = torch_patches.backwards()
    torch.ones((), requires_grad=True).backward()
    assert recorder.told == [("before", False), ("after", False)]
    assert torch_patches.backwards() == number + 1
    assert not torch_patches.inside_backward()


def test_a_backward_that_raises_is_told_as_failed(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert recorder.told[-1] == ("after", True)
    assert not torch_patches.inside_backward()


def test_the_norm_inside_clipping_is_told_with_all_gradients(recorder: Recorder) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.tensor([3.0])
    # an iterator, which may be read once only
    norm = nn.utils.clip_grad_norm_(iter(parameters), 1.0)
    assert recorder.told == [("norm", 2, float(norm))]


def test_norms_of_another_kind_are_not_told(recorder: Recorder) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    nn.utils.clip_grad_norm_([parameter], 1.0, norm_type=1.0)
    assert recorder.told == []


def test_loading_scaling_and_averaging_are_told(recorder: Recorder) -> None:
    model = nn.Linear(1, 1)
    model.load_state_dict(model.state_dict())
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.told.clear()
    scaler.scale(model(torch.ones(1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert recorder.told[-2:] == ["scaled step", "update"]


def test_an_average_can_be_refused(recorder: Recorder) -> None:
    model = nn.Linear(1, 1)
    average = AveragedModel(model)
    recorder.veto_average = True
    average.update_parameters(model)
    assert int(average.n_averaged) == 0
    recorder.veto_average = False
    average.update_parameters(model)
    assert int(average.n_averaged) == 1
