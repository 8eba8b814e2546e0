"""A guard owns what its optimizer holds: a rewind leaves alone what somebody else trains below the
same model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import difference, quiet
from stepguard import Guard
from stepguard.state.run_state import Ownership, RunState

STEPS = 24
DAMAGE = 17


class Judge(nn.Module):
    """Has a norm layer without parameters of its own, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 1)
        )
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.net(inputs)


class Gan(nn.Module):
    """Both networks in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.judge = Judge()


def _judge_loss(gan: Gan, batch: Tensor) -> Tensor:
    return nn.functional.softplus(
        gan.judge(gan.maker(batch[:, :3]).detach()) - gan.judge(batch)
    ).mean()


def _maker_loss(gan: Gan, batch: Tensor) -> Tensor:
    return nn.functional.softplus(-gan.judge(gan.maker(batch[:, :3]))).mean()


def _data() -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(8, 4, generator=source)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one module", "modules="])
@pytest.mark.parametrize("toggles", [False, True])
def test_rewind_of_one_network_leaves_the_other_one_s_weights_moments_statistics_and_numbers(
    shape: str, toggles: bool
) -> None:
    gan = Gan()
    for_maker = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    for_judge = torch.optim.Adam(gan.judge.parameters(), 1e-3)
    config = quiet(snapshot_every=4, probation=4)
    if shape == "one module":
        makers, judges = Guard(gan, for_maker, config=config), Guard(gan, for_judge, config=config)
    else:
        makers = Guard(gan.maker, for_maker, modules={"judge": gan.judge}, config=config)
        judges = Guard(gan.judge, for_judge, modules={"maker": gan.maker}, config=config)
    with makers, judges:
        for index, batch in enumerate(_data()):
            judges.step(lambda b: _judge_loss(gan, b), batch)
            if index == DAMAGE:
                with torch.no_grad():
                    gan.maker[0].weight[0, 0] = float("nan")
            gan.judge.requires_grad_(not toggles)
            before = copy.deepcopy((dict(gan.judge.named_parameters()), for_judge.state_dict()))
            counted = gan.judge.calls
            makers.step(lambda b: _maker_loss(gan, b), batch)
            gan.judge.requires_grad_(True)
            if index == DAMAGE:
                after = (dict(gan.judge.named_parameters()), for_judge.state_dict())
                assert difference(dict(after[0]), dict(before[0])) == ""
                assert difference(after[1], before[1]) == ""
                assert gan.judge.calls >= counted
    decision = makers.incidents[0].decision
    assert decision is not None and decision.action == "rewind"
    assert judges.incidents == ()
    assert all(bool(p.isfinite().all()) for p in gan.parameters())


def test_restore_from_disk_puts_back_everything(tmp_path: Path) -> None:
    gan = Gan()
    optimizer = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    with Guard(gan, optimizer, config=quiet(run_dir=tmp_path, on_signal="off")) as guard:
        for batch in _data():
            guard.step(lambda b: _maker_loss(gan, b), batch)
        guard.save()
        then = copy.deepcopy(gan.state_dict())
        with torch.no_grad():
            for parameter in gan.parameters():
                parameter.add_(1.0)
        guard.restore()
    assert difference(dict(gan.state_dict()), dict(then)) == ""


def test_other_network_that_goes_bad_is_data_and_rewinds_nothing() -> None:
    gan = Gan()
    optimizer = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    with Guard(gan, optimizer, config=quiet(snapshot_every=4, probation=4, locate=True)) as guard:
        for index, batch in enumerate(_data()):
            if index == DAMAGE:
                before = copy.deepcopy(gan.maker.state_dict())
                with torch.no_grad():
                    gan.judge.net[0].weight[0, 0] = float("nan")
            guard.step(lambda b: _maker_loss(gan, b), batch)
            if index == DAMAGE:
                break
    (incident,) = guard.incidents
    assert incident.decision is not None and incident.decision.action != "rewind"
    assert incident.reading.bad_state == ()
    assert incident.origin is not None and incident.origin.tensor == "param:judge.net.0.weight"
    assert difference(dict(gan.maker.state_dict()), dict(before)) == ""


class Taught(nn.Module):
    """A frozen teacher that the loop averages into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def test_teacher_that_no_optimizer_holds_goes_back_with_its_student() -> None:
    model = Taught()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.1)
    whole = RunState({"": model}, optimizer)
    state = whole.gather()
    state.tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    then = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    whole.put_back(state, own_only=True)
    assert difference(dict(model.state_dict()), dict(then)) == ""


def test_only_own_parameters_are_exchanged() -> None:
    gan = Gan()
    optimizer = torch.optim.SGD(gan.maker.parameters(), 0.1)
    whole = RunState({"": gan}, optimizer)
    state = whole.gather()
    state.tensors = {name: torch.zeros_like(tensor) for name, tensor in state.tensors.items()}
    with whole.parameters_from(state):
        assert not gan.maker[0].weight.any()
        assert gan.judge.net[0].weight.any()
    assert gan.maker[0].weight.any()


def test_parameter_of_another_guarded_optimizer_is_not_own_even_while_frozen() -> None:
    gan = Gan()
    gan.judge.requires_grad_(False)
    mine, theirs = (
        torch.optim.SGD(gan.maker.parameters(), 0.1),
        torch.optim.SGD(gan.judge.parameters(), 0.1),
    )
    assert Ownership({"": gan}, mine).elsewhere() == set()
    assert Ownership({"": gan}, mine, [mine, theirs]).elsewhere() == {
        id(p) for p in gan.judge.parameters()
    }


def test_damage_before_the_first_step_is_told_whosever_it_is() -> None:
    gan = Gan()
    with torch.no_grad():
        gan.judge.net[0].weight[0, 0] = float("nan")
    optimizer = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    with Guard(gan, optimizer, config=quiet()) as guard, pytest.raises(stepguard.TrainingHalted):
        guard.step(lambda b: _maker_loss(gan, b), next(_data()))
    assert guard.incidents[0].reading.bad_state == ("param:judge.net.0.weight",)
