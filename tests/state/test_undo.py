"""An update that was undone left nothing behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from stepguard.state.buffers import UndoCopy


def test_an_update_is_undone_in_the_same_tensors() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = parameter.detach().clone()
    moment = optimizer.state[parameter]["exp_avg"]
    kept = moment.clone()
    copy = UndoCopy(optimizer)
    optimizer.step()
    assert copy.restore() == ()
    assert torch.equal(parameter, before)
    assert optimizer.state[parameter]["exp_avg"] is moment
    assert torch.equal(moment, kept)


def test_what_the_first_update_made_is_removed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Adam([parameter], lr=0.1)
    copy = UndoCopy(optimizer)
    parameter.grad = torch.ones(2)
    optimizer.step()
    copy.restore()
    assert len(optimizer.state) == 0
    assert torch.equal(parameter.detach(), torch.ones(2))


class Odd:
    __slots__ = ("value",)


class Holder(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.odd = Odd()


def test_what_cannot_be_compared_is_named() -> None:
    assert UndoCopy(Holder([nn.Parameter(torch.zeros(1))])).restore() == ("Holder.odd (Odd)",)
