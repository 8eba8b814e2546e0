"""Values of every kind are remembered, compared and put back in the very same objects."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepguard.state.python_state import MANY, Kept, Scope, keep


def remembered(value: Any) -> Kept:
    kept = keep(value, Scope())
    assert kept is not None
    return kept


CHANGES: dict[str, tuple[Any, Any]] = {
    "dict": ({"a": 1}, lambda v: v.update(b=2)),
    "list": ([1, 2], lambda v: v.append(3)),
    "deque": (deque([1], maxlen=3), lambda v: v.appendleft(0)),
    "set": ({1}, lambda v: v.add(2)),
    "tensor": (torch.zeros(2), lambda v: v.add_(1)),
    "array": (np.zeros(2), lambda v: v.__setitem__(0, 5.0)),
    "tuple": (([1],), lambda v: v[0].clear()),
    "nested": ({"a": [{"b": torch.zeros(1)}]}, lambda v: v["a"][0]["b"].fill_(7)),
    "object": (SimpleNamespace(n=1, seen=[]), lambda v: (setattr(v, "n", 2), v.seen.append(1))),
    "long": (list(range(MANY + 1)), lambda v: v.append(1)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_undone(kind: str) -> None:
    value, change = CHANGES[kind]
    before = repr(value)
    kept = remembered(value)
    assert not kept.moved(set())
    change(value)
    assert kept.moved(set())
    kept.restore(set())
    assert repr(value) == before
    assert not kept.moved(set())


def test_refresh_takes_the_present_value() -> None:
    value = {"a": [1]}
    kept = remembered(value)
    value["a"].append(2)
    kept.refresh(set())
    assert not kept.moved(set())
    value["a"].clear()
    kept.restore(set())
    assert value == {"a": [1, 2]}


def test_containers_in_a_circle_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    kept = remembered(value)
    assert not kept.moved(set())
    value.append(2)
    kept.restore(set())
    assert len(value) == 2


@pytest.mark.parametrize("value", [3, "text", None, print, nn.Linear(1, 1), torch.float32])
def test_what_cannot_change_or_does_something_is_left_alone(value: object) -> None:
    assert keep(value, Scope()) is None


def test_parameters_are_remembered_only_where_everything_is() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    assert keep(parameter, Scope()) is None
    kept = keep(parameter, Scope("update"))
    assert kept is not None
    # The version counter does not see a write through .data.
    parameter.data.fill_(3.0)
    assert kept.moved(set())
    kept.restore(set())
    assert float(parameter.detach()) == 0.0


def test_a_tensor_with_a_graph_is_not_held() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    value = [loss]
    kept = remembered(value)
    value[0] = torch.zeros(1)
    kept.restore(set())
    assert value[0] is loss
