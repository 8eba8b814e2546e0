"""The state of a run is saved and restored, in place, by name; a misfit is named."""

from __future__ import annotations

import copy
import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from scenes import batches, difference, generators, noisy_net, plain_net
from stepguard._errors import StateError
from stepguard.state.run_state import RunState, SavedState

DATA = batches(6)
SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, 0.1, max_iter=3),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
}


class Counting(nn.Module):
    """A module with a number that moves and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.width = noisy_net(), 0, 8
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.table += 1
        return self.net(inputs)


def _train(model: nn.Module, optimizer: Any, scheduler: Any = None, count: int = 3) -> None:
    def closure(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    for batch in DATA[:count]:
        optimizer.step(partial(closure, batch))
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()


def _frozen(state: SavedState) -> SavedState:
    """A copy that has been through JSON, as one from disk has."""
    return SavedState(
        {name: t.clone() for name, t in state.tensors.items()}, json.loads(json.dumps(state.facts))
    )


def _everything(model: nn.Module, optimizer: Any, scheduler: Any = None) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
        }
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_comes_back_bit_for_bit_and_in_place(name: str) -> None:
    model = noisy_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    _train(model, optimizer)
    whole = RunState({"": model}, optimizer)
    state, then = _frozen(whole.gather()), _everything(model, optimizer)
    tensors = {
        id(v) for s in optimizer.state.values() for k, v in s.items() if isinstance(v, Tensor)
    }
    _train(model, optimizer)
    assert difference(_everything(model, optimizer), then) != ""
    whole.put_back(state)
    assert difference(_everything(model, optimizer), then) == ""
    if name != "lbfgs":  # which replaces its own tensors
        assert tensors == {
            id(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)
        }


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_comes_back_and_goes_on_as_it_would_have(name: str) -> None:
    def built() -> tuple[nn.Module, Any, Any]:
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, SCHEDULES[name](optimizer)

    model, optimizer, scheduler = built()
    _train(model, optimizer, scheduler)
    state = _frozen(RunState({"": model}, optimizer, scheduler=scheduler).gather())
    _train(model, optimizer, scheduler, count=2)
    fresh = built()
    RunState({"": fresh[0]}, fresh[1], scheduler=fresh[2]).put_back(state)
    _train(*fresh, count=2)
    assert difference(_everything(*fresh), _everything(model, optimizer, scheduler)) == ""


def test_counters_and_buffers_that_state_dict_leaves_out_come_back() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = RunState({"": model}, optimizer)
    whole.gather()
    _train(model, optimizer, count=2)
    state = _frozen(whole.gather())
    _train(model, optimizer)
    whole.put_back(state)
    assert (model.calls, model.width, model.table.tolist()) == (2, 8, [2.0, 2.0])
    assert [place for place, _ in state.facts["numbers"]["mapping"]] == ["model/:calls"]


def test_setting_of_a_fresh_program_is_not_overwritten_by_an_old_state() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = _frozen(RunState({"": model}, optimizer).gather())
    model.width = 99
    RunState({"": model}, optimizer).put_back(state)
    assert model.width == 99


def test_random_numbers_come_back_when_asked_for() -> None:
    model = plain_net()
    whole = RunState({"": model}, torch.optim.SGD(model.parameters(), 0.1))
    state, then = _frozen(whole.gather()), generators()
    torch.rand(3), random.random(), np.random.rand()
    whole.put_back(state)
    assert difference(generators(), then) != ""
    whole.put_back_random_numbers(state)
    assert difference(generators(), then) == ""


def test_scaler_comes_back_also_into_one_that_has_not_been_used() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for inputs, targets in DATA[:3]:
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = _frozen(RunState({"": model}, optimizer, scaler=scaler).gather())
    saved = scaler.state_dict()
    fresh = GradScaler("cpu", init_scale=2.0, growth_interval=2)
    RunState({"": model}, optimizer, scaler=fresh).put_back(state)
    fresh.scale(torch.ones(()))
    assert fresh.state_dict() == saved
    scaler._scale.fill_(1.0)
    RunState({"": model}, optimizer, scaler=scaler).put_back(state)
    assert scaler.state_dict() == saved


class Shadow:
    """An EMA as people write it: a plain object that hands out and takes its tensors."""

    def __init__(self) -> None:
        self.values, self.updates = {"w": torch.zeros(3)}, 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.updates = state["values"], state["updates"]


def test_further_objects_come_back_and_share_no_memory_with_the_copy() -> None:
    model = plain_net()
    shadow, average = Shadow(), torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = RunState({"": model}, optimizer, extra={"ema": shadow, "swa": average})
    state = _frozen(whole.gather())
    shadow.values["w"] += 5
    shadow.updates = 7
    with torch.no_grad():
        average.module[0].weight.zero_()
    whole.put_back(state)
    shadow.values["w"] += 1
    assert shadow.updates == 0 and state.tensors["extra:ema/values/w"].tolist() == [0, 0, 0]
    assert torch.equal(average.module[0].weight, model[0].weight)


def test_order_of_parameters_does_not_matter() -> None:
    model = plain_net()
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(names.values(), 0.01)
    _train(model, optimizer)
    state = _frozen(RunState({"": model}, optimizer).gather())
    turned = torch.optim.AdamW(reversed(list(names.values())), 0.5)
    RunState({"": model}, turned).put_back(state)
    for parameter in names.values():
        assert difference(dict(turned.state[parameter]), dict(optimizer.state[parameter])) == ""
    assert turned.param_groups[0]["lr"] == 0.01


def test_learning_rate_that_is_a_tensor_keeps_its_identity() -> None:
    model = plain_net()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    whole = RunState({"": model}, optimizer)
    state = _frozen(whole.gather())
    rate.fill_(9.0)
    whole.put_back(state)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.1)


def test_choice_of_a_kernel_is_not_part_of_the_state() -> None:
    model = plain_net()
    state = _frozen(
        RunState({"": model}, torch.optim.AdamW(model.parameters(), 0.01, foreach=False)).gather()
    )
    fused = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    RunState({"": model}, fused).put_back(state)
    assert fused.param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: nn.Sequential(*m, nn.Linear(3, 3)),
            "model/3.weight is in the model and not in the saved state",
        ),
        (
            lambda m: nn.Sequential(m[0]),
            "model/2.weight is in the saved state and not in the model",
        ),
        (
            lambda m: nn.Sequential(nn.Linear(6, 9), m[1], m[2]),
            r"\[9, 6\] in the model and float32 \[8, 6\]",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_before_anything_is_touched(
    change: Any, said: str
) -> None:
    model = plain_net()
    state = _frozen(RunState({"": model}, torch.optim.SGD(model.parameters(), 0.1)).gather())
    other = change(plain_net())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(StateError, match=said):
        RunState({"": other}, torch.optim.SGD(other.parameters(), 0.1)).put_back(state)
    assert difference(dict(other.state_dict()), dict(before)) == ""


def test_what_cannot_be_kept_is_named() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

        load_state_dict = None

    model = plain_net()
    with pytest.raises(StateError, match="extra:odd/seen is a set"):
        RunState(
            {"": model}, torch.optim.SGD(model.parameters(), 0.1), extra={"odd": Odd()}
        ).gather()
