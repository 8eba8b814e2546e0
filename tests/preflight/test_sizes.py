"""Bytes of weights, gradients and optimizer state, before and after they exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepguard.check.items import available_memory
from stepguard.check.preflight import Subject, check

MODEL = nn.BatchNorm1d(4)
"""8 parameters, and buffers of 8 floats and one integer."""


def estimate(model: nn.Module, optimizer: Any = None) -> str:
    subject = Subject(model=model, optimizer=optimizer)
    return check(subject, only=["memory.estimate"]).outcome("memory.estimate").evidence[0]


def test_model_counts_buffers_and_gradients_count_what_is_trained() -> None:
    assert "weights 72 B, gradients 32 B," in estimate(MODEL)
    assert "gradients 0 B," in estimate(nn.Linear(2, 2).requires_grad_(False))


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
    assert f"optimizer {slots * 32} B ({slots} slots a parameter)" in estimate(MODEL, optimizer)


def test_state_that_exists_is_measured() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert "optimizer 36 B (as it is)" in estimate(model, optimizer)
    assert "optimizer 32 B (two moments assumed)" in estimate(model)


def test_free_memory_of_the_host_is_known() -> None:
    free = available_memory(torch.device("cpu"))
    assert free is not None and free > 0
