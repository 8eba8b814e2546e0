"""Parameters, gradients and updates in a look."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from probes.looked import look_at
from stepguard.records.probes import Look, ParameterLook


def parameter(look: Look, name: str) -> ParameterLook:
    return next(one for one in look.parameters if one.name == name)


def test_size_of_an_update_beside_the_weight() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    look = look_at(model, lambda x: model(x).sum(), torch.ones(1, 4), optimizer)
    found = parameter(look, "weight")
    assert found.gradient == pytest.approx(1.0)
    assert found.ratio == pytest.approx(0.05)
    assert found.lost == 0.0


def test_updates_that_bfloat16_rounds_away_are_lost() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    look = look_at(model, lambda x: model(x).sum(), torch.ones(1, 4).bfloat16(), optimizer)
    found = parameter(look, "weight")
    assert (found.lost, found.update, found.dtype) == (1.0, 0.0, "bfloat16")


def test_what_no_optimizer_holds_and_what_is_frozen_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    look = look_at(model, lambda x: model(x).sum(), torch.ones(1, 2), optimizer)
    assert not parameter(look, "0.weight").trainable
    assert parameter(look, "0.weight").gradient is None
    assert not parameter(look, "1.weight").owned


def test_second_moments_of_adam_that_underflow_are_counted() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tiny = look_at(model, lambda x: 1e-30 * model(x).sum(), torch.ones(1, 4), optimizer)
    assert parameter(tiny, "weight").variance_zeros == 1.0
    fresh = torch.optim.Adam(model.parameters(), lr=1e-3)
    plain = look_at(model, lambda x: model(x).sum(), torch.ones(1, 4), fresh)
    assert parameter(plain, "weight").variance_zeros == 0.0
    assert parameter(plain, "weight").variance == pytest.approx(1e-3)
