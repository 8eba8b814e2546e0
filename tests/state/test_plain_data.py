"""What is data, and what does something."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stepguard.state.python_state import (
    MANY,
    SMALL,
    WithoutGraph,
    has_graph,
    holds_only_data,
    is_array,
    is_data,
    original,
)


@pytest.mark.parametrize("value", [1, "a", None, [1], {"a": 1}, torch.zeros(1), np.zeros(1)])
def test_values_are_data(value: object) -> None:
    assert is_data(value)
    assert holds_only_data(value)


@pytest.mark.parametrize("value", [print, nn.Linear(1, 1), len, lambda: 0])
def test_functions_and_modules_are_not_data(value: object) -> None:
    assert not is_data(value)
    assert not holds_only_data([value])


def test_an_object_is_only_data_if_all_it_holds_is() -> None:
    assert holds_only_data(SimpleNamespace(n=[1, {"x": torch.zeros(1)}]))
    assert not holds_only_data(SimpleNamespace(call=print))
    assert not holds_only_data(logging.getLogger("x"))
    assert not holds_only_data(list(range(MANY + 1)))
    assert is_array(np.zeros(1))
    assert not is_array([1])


@pytest.mark.slow
def test_the_graph_of_a_held_tensor_is_freed() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    assert has_graph(loss)
    held = WithoutGraph(loss)
    assert original(held, None) is loss
    del loss
    gc.collect()
    values = original(held, None)
    assert not has_graph(values)
    assert float(values) == 2.0


@pytest.mark.slow
def test_values_of_a_large_tensor_are_not_held() -> None:
    large = torch.ones(SMALL + 1, requires_grad=True) * 2
    held = WithoutGraph(large)
    del large
    gc.collect()
    assert original(held, "otherwise") == "otherwise"
    assert original(3, "otherwise") == 3
