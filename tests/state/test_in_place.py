"""Saved values go into the live objects where they fit."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from stepguard.state.batch import Refill, in_containers_of, tree_to_json


def saved(value: Any) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    structure = tree_to_json(value, tensors, "x")
    return structure, {name: tensor.clone() for name, tensor in tensors.items()}


def test_the_same_tensors_and_containers_are_refilled() -> None:
    live: dict[str, Any] = {
        "a": [torch.zeros(2)],
        "b": deque([1, 2], maxlen=4),
        "c": (torch.ones(1),),
    }
    inner = live["a"][0]
    structure, tensors = saved(live)
    inner.fill_(7.0)
    live["b"].append(3)
    live["new"] = 1
    back = Refill(tensors, {}).value(live, structure)
    assert back is live
    assert live["a"][0] is inner
    assert inner.tolist() == [0.0, 0.0]
    assert list(live["b"]) == [1, 2]
    assert "new" not in live


def test_what_does_not_fit_is_made_new_and_only_once() -> None:
    shared = torch.ones(3)
    structure = [{"tensor": "x"}, {"tensor": "x"}]
    first, second = Refill({"x": shared}, {}).value([torch.zeros(2), None], structure)
    assert first is second
    assert torch.equal(first, shared)
    assert first is not shared


def test_values_take_the_containers_of_the_live_ones() -> None:
    live = {"seen": Counter(a=1), "lists": defaultdict(list), "pair": (torch.zeros(1), 2)}
    back = in_containers_of(live, {"seen": {"b": 2}, "lists": {}, "pair": [torch.ones(1), 3]})
    assert type(back["seen"]) is Counter
    assert back["seen"] == {"b": 2}
    back["lists"]["x"].append(1)
    assert back["pair"][1] == 3
    assert live["seen"] == {"a": 1}
