"""Which updates could make NaN out of finite gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from stepguard.judge.history import LR_JUMP
from stepguard.sentinel.gradients import CHEAP_COPY, is_custom, risky_update


class Own(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})


def adam(dtype: torch.dtype = torch.float32, **settings: Any) -> Adam:
    return Adam([nn.Parameter(torch.zeros(2, dtype=dtype))], **{"lr": 0.01, **settings})


def test_an_ordinary_update_is_not_risky() -> None:
    assert not risky_update(adam(), (0.01,), 1.0)


@pytest.mark.parametrize("rate", [LR_JUMP * 0.01 * 1.001, math.inf, math.nan])
def test_a_rate_far_above_the_configured_one_is_risky(rate: float) -> None:
    optimizer = adam()
    optimizer.param_groups[0]["lr"] = rate
    assert risky_update(optimizer, (0.01,))


def test_a_group_added_later_has_no_ceiling() -> None:
    optimizer = adam()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 100.0})
    assert not risky_update(optimizer, (0.01,))


def test_half_precision_parameters_are_risky() -> None:
    assert risky_update(adam(torch.float16), (0.01,))


def test_an_epsilon_that_vanishes_in_the_dtype_is_risky() -> None:
    assert not risky_update(adam(torch.bfloat16, eps=1e-8), (0.01,))
    assert risky_update(adam(torch.bfloat16, eps=1e-45), (0.01,))
    assert risky_update(adam(eps=0.0), (0.01,))


def test_a_custom_optimizer_is_risky_if_small_or_a_gradient_is_zero() -> None:
    small = Own([nn.Parameter(torch.zeros(2))])
    large = Own([nn.Parameter(torch.zeros(CHEAP_COPY + 1))])
    assert is_custom(small)
    assert not is_custom(adam())
    assert risky_update(small, (0.01,), 1.0)
    assert not risky_update(large, (0.01,), 1.0)
    assert risky_update(large, (0.01,), 0.0)
