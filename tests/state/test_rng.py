"""Every generator a step may draw from repeats exactly."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch

from stepguard.state.rng import capture_rng, restore_rng


def _draw() -> tuple[float, float, float, float]:
    torch_gauss = torch.randn(3).sum().item()
    return (
        torch.rand(()).item(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        torch_gauss,
    )


def test_restored_generators_repeat_every_draw() -> None:
    state = capture_rng()
    first = _draw()
    assert _draw() != first
    restore_rng(state)
    assert _draw() == first


def test_capturing_draws_nothing() -> None:
    state = capture_rng()
    expected = _draw()
    restore_rng(state)
    capture_rng()
    assert _draw() == expected


def test_captured_state_can_be_restored_many_times() -> None:
    state = capture_rng()
    draws = []
    for _ in range(3):
        restore_rng(state)
        draws.append(_draw())
    assert draws[0] == draws[1] == draws[2]


def test_odd_gaussian_draw_repeats_too() -> None:
    # python and numpy keep the second value of each pair they make
    random.gauss(0, 1)
    np.random.standard_normal()
    state = capture_rng()
    first = _draw()
    restore_rng(state)
    assert _draw() == first


def test_dropout_repeats() -> None:
    layer, x = torch.nn.Dropout(0.5), torch.ones(64)
    state = capture_rng()
    first = layer(x)
    restore_rng(state)
    assert torch.equal(layer(x), first)


def test_program_without_numpy_is_left_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    state = capture_rng()
    assert state.numpy is None
    torch.rand(())
    restore_rng(state)
    assert "numpy" not in sys.modules
    assert torch.equal(torch.get_rng_state(), state.cpu)
