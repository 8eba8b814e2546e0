"""Which optimizers need a driver of their own, told by what they are and not by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from guard.optimizers import OPTIMIZERS
from stepguard.engine.drivers.schedule import (
    calls_of_step,
    evaluates_again,
    inner_optimizer,
    needs_closure,
    takes_closure,
    takes_found_inf,
)


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3))]


def test_lbfgs_evaluates_the_loss_from_the_start() -> None:
    optimizer = torch.optim.LBFGS(_parameters())
    assert needs_closure(optimizer)
    assert not evaluates_again(optimizer)


def test_sam_evaluates_the_loss_again_after_a_first_move() -> None:
    optimizer = OPTIMIZERS["sam"](_parameters())
    assert evaluates_again(optimizer)
    assert not needs_closure(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optional_closure_needs_no_driver_of_its_own(kind: Any) -> None:
    assert not takes_closure(kind(_parameters()))


class Required(Optimizer):
    """A step that cannot be called without a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


def test_closure_without_a_default_is_needed() -> None:
    assert needs_closure(Required(_parameters()))


def test_inner_optimizer_is_found_only_for_the_same_parameters() -> None:
    outer = OPTIMIZERS["lookahead"](_parameters())
    assert inner_optimizer(outer) is not None
    plain = torch.optim.SGD(_parameters())
    plain.helper = torch.optim.SGD(_parameters())  # type: ignore[attr-defined]
    assert inner_optimizer(plain) is None


def test_calls_of_step_counts_those_that_are_running() -> None:
    counted: list[int] = []

    class Nested(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            counted.append(calls_of_step(self))
            return super().step(closure)

    optimizer = Nested(_parameters(), lr=0.1)
    optimizer.step()
    assert counted == [1]
    assert calls_of_step(optimizer) == 0


def test_only_fused_groups_take_a_flag() -> None:
    assert takes_found_inf(torch.optim.AdamW(_parameters(), fused=True))
    assert not takes_found_inf(torch.optim.AdamW(_parameters()))
