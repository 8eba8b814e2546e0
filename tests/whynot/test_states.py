"""Fixes for a run whose state is hurt: skipping, resuming, lowering the rate, a safe exit."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import stepguard
from stepguard import Guard, GuardConfig, Probes, TrainingHalted

QUIET = GuardConfig(terminal="quiet", probes=Probes(locate_budget=0))


def poisoned() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.weight.data[0, 0] = math.nan
    return model


def test_skipping_never_heals_a_nan_weight_and_the_guard_stops_at_once() -> None:
    model, skipped = poisoned(), 0
    for _ in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
        skipped += not bool(torch.isfinite(loss))
    assert skipped == 100

    optimizer = torch.optim.AdamW(model.parameters())
    with Guard(model, optimizer, config=QUIET) as guard, pytest.raises(TrainingHalted) as halted:
        guard.step(lambda batch: model(batch).square().mean(), torch.randn(8, 4))
    assert halted.value.incident.reading.bad_state == ("param:weight",)


def test_weights_that_were_repaired_are_poisoned_again_by_the_optimizer_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.tensor([math.nan, 1.0])
    optimizer.step()
    weight.data.fill_(1.0)  # repaired
    weight.grad = torch.ones(2)
    optimizer.step()
    assert torch.isnan(weight).tolist() == [True, False]


def test_a_safe_exit_leaves_batchnorm_poisoned() -> None:
    torch.manual_seed(0)
    norm, inputs = nn.BatchNorm2d(3), torch.randn(4, 3, 8, 8)
    inputs[0, 0, 0, 0] = math.nan
    hidden = norm(inputs)
    out = hidden if bool(torch.isfinite(hidden).all()) else torch.zeros_like(inputs)

    assert bool(torch.isfinite(out).all())
    assert all(bool(torch.isfinite(p).all()) for p in norm.parameters())
    assert bool(torch.isnan(norm.eval()(torch.randn(1, 3, 8, 8))).any())  # every later evaluation


def test_one_average_with_a_poisoned_model_poisons_the_average() -> None:
    model = poisoned()
    average = nn.Linear(4, 1)
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1e-3)
    assert bool(torch.isnan(average.weight).any())


@pytest.mark.parametrize("rate", [1e-2, 1e-4, 1e-8])
def test_a_lower_learning_rate_does_not_move_a_failure_of_the_data(rate: float) -> None:
    """log(0) in a time embedding, once in 1001 draws: the failure of recipes/radiodiff."""
    torch.manual_seed(0)
    model, source = nn.Linear(2, 1), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    first = -1
    for step in range(400):
        times = torch.randint(0, 1001, (16, 1), generator=source) / 1000
        angles = torch.log(times) / 4
        loss = model(torch.cat([angles.sin(), angles.cos()], 1)).square().mean()
        if not torch.isfinite(loss):
            first = step
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first == 50


def run(peak: float) -> tuple[torch.optim.Optimizer, OneCycleLR]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=peak)
    return optimizer, OneCycleLR(optimizer, peak, total_steps=1000)


def test_a_lower_rate_in_the_configuration_is_undone_by_loading_the_optimizer() -> None:
    optimizer, schedule = run(5e-4)
    for _ in range(200):
        optimizer.step()
        schedule.step()
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    resumed, its_schedule = run(1e-4)
    its_schedule.load_state_dict(saved[1])
    resumed.step()
    its_schedule.step()
    assert resumed.param_groups[0]["lr"] < 1e-4  # the schedule alone keeps the new peak

    resumed.load_state_dict(saved[0])
    resumed.step()
    its_schedule.step()
    assert resumed.param_groups[0]["lr"] == pytest.approx(schedule.get_last_lr()[0], rel=0.05)
    assert resumed.param_groups[0]["max_lr"] == 5e-4


def test_the_rates_of_the_reports_healthy_log_are_impossible_with_its_settings() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-4)
    schedule = OneCycleLR(optimizer, 1e-4, total_steps=80 * 594)
    rates = []
    for _ in range(15 * 594):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ends = [rates[epoch * 594 - 1] for epoch in (1, 2, 15)]
    assert ends == pytest.approx(
        [4.41e-6, 5.63e-6, 7.04e-5], rel=0.01
    )  # said: 5.00e-05, 7.23e-05, 1.23e-04


def test_a_floor_given_to_lambda_lr_is_a_factor_and_past_the_end_a_complex_number() -> None:
    steps, floor = 50_000, 1e-6

    def factor(step: int) -> float:
        return max((1 - step / steps) ** 0.96, floor)

    schedule = LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-5), factor)
    assert schedule.base_lrs[0] * factor(steps) == pytest.approx(1e-11)  # 1e-6 was meant
    with pytest.raises(TypeError, match="complex"):
        factor(steps + 1)


def test_the_reports_look_at_a_checkpoint_misses_inf_optimizer_and_other_layouts(
    tmp_path: Path,
) -> None:
    def one_liner(path: Path) -> bool:
        return any(bool(torch.isnan(p).any()) for p in torch.load(path)["model"].values())

    model = nn.Linear(2, 2)
    infinite = {**model.state_dict(), "bias": torch.tensor([math.inf, 0.0])}
    moments = {
        "state": {0: {"exp_avg": torch.tensor([math.nan])}},
        "param_groups": [{"params": [0], "lr": 0.1}],
    }
    files = {
        "infinite": {"model": infinite},
        "moments": {"model": model.state_dict(), "optimizer": moments},
        "bare": {**model.state_dict(), "bias": torch.tensor([math.nan, 0.0])},
    }
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pt")

    assert [one_liner(tmp_path / f"{name}.pt") for name in ("infinite", "moments")] == [
        False,
        False,
    ]
    with pytest.raises(KeyError):
        one_liner(tmp_path / "bare.pt")
    assert [stepguard.verify(tmp_path / f"{name}.pt").ok for name in files] == [False] * 3
