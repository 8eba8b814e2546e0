"""One process alone: no collective, no hook. Several ranks are tested in tests/distributed."""

from __future__ import annotations

import torch
from torch import nn

from stepguard.ranks.agreement import Agreement, world


def test_one_process_is_alone_and_installs_nothing() -> None:
    model = nn.Linear(2, 1)
    agreement = Agreement(model)
    assert world() == (0, 1)
    assert agreement.mode == "alone"
    assert all(not p._backward_hooks for p in model.parameters())


def test_one_process_needs_no_reduction_and_asks_itself() -> None:
    agreement = Agreement(nn.Linear(2, 1))
    assert agreement.reduce(torch.ones(4), step=0) is None
    assert agreement.together(lambda: {"bad": ["param:weight"]}, "a look") == [
        {"bad": ["param:weight"]}
    ]


def test_a_disarmed_process_alone_never_refuses() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([float("nan")])
    assert not Agreement(nn.Linear(2, 1)).stay(0, [parameter])
