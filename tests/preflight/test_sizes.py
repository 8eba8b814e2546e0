"""Bytes of weights, gradients and optimizer state, before and after they exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepguard.preflight.subject import (
    available_memory,
    gradient_bytes,
    model_bytes,
    optimizer_bytes,
)

MODEL = nn.BatchNorm1d(4)
"""8 parameters, and buffers of 8 floats and one integer."""


def test_model_counts_buffers_and_gradients_count_what_is_trained() -> None:
    assert model_bytes(MODEL) == 8 * 4 + 8 * 4 + 8
    assert gradient_bytes(MODEL) == 8 * 4
    assert gradient_bytes(nn.Linear(2, 2).requires_grad_(False)) == 0


@pytest.mark.parametrize(
    ("kind", "options", "slots"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adagrad, {}, 1),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.RMSprop, {"momentum": 0.9}, 2),
    ],
)
def test_state_is_estimated_by_the_kind_of_optimizer(
    kind: Any, options: dict[str, float], slots: int
) -> None:
    optimizer = kind(MODEL.parameters(), lr=0.1, **options)
    optimizer.state.clear()
    assert optimizer_bytes(MODEL, optimizer) == (slots * 32, f"{slots} slots a parameter")


def test_state_that_exists_is_measured() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert optimizer_bytes(model, optimizer) == (2 * 16 + 4, "as it is")
    assert optimizer_bytes(model, None) == (32, "two moments assumed")


def test_free_memory_of_the_host_is_known() -> None:
    free = available_memory(torch.device("cpu"))
    assert free is not None and free > 0
