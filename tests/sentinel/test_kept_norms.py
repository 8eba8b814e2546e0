"""Norms of single gradients: kept without a read, and put together by module at an incident."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from stepguard.sentinel.gradients import (
    MOST_MODULES,
    STEPS,
    GradientNorms,
    gradient_norm,
)

NAMES = ("a.weight", "a.bias", "b.weight")


def _kept(*steps: tuple[float, float, float]) -> GradientNorms:
    norms = GradientNorms()
    for number, values in enumerate(steps):
        norms.keep(number, torch.tensor(values))
    return norms


def test_modules_put_the_norms_of_their_parameters_together() -> None:
    table = _kept((3.0, 4.0, 1.0), (0.0, 0.0, math.nan)).table(NAMES)
    assert table == {"steps": [0, 1], "modules": ["a", "b"], "norms": [[5.0, 0.0], [1.0, "nan"]]}


def test_only_the_last_steps_are_kept() -> None:
    table = _kept(*[(1.0, 1.0, 1.0)] * (STEPS + 5)).table(NAMES)
    assert table["steps"] == list(range(5, STEPS + 5))


def test_steps_without_a_gradient_for_each_parameter_are_left_out() -> None:
    assert _kept((1.0, 1.0, 1.0)).table(("a.weight", "b.weight")) is None
    assert GradientNorms().table(NAMES) is None


def test_a_large_model_is_shown_by_the_first_parts_of_its_names() -> None:
    names = [f"layers.{layer}.block.{part}.weight" for layer in range(30) for part in range(5)]
    norms = GradientNorms()
    norms.keep(0, torch.ones(len(names)))
    table = norms.table(names)
    assert table["modules"] == [f"layers.{layer}.block" for layer in range(30)]
    assert len(table["modules"]) <= MOST_MODULES


def test_total_is_torchs_own_to_the_last_bit_and_single_norms_come_with_it() -> None:
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5), nn.LayerNorm(5))
    model(torch.randn(16, 7)).pow(2).mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    norm = gradient_norm(grads)
    assert torch.equal(norm.total, get_total_norm(grads))
    assert norm.least is None
    assert torch.equal(norm.single, torch.stack([grad.norm() for grad in grads]))
