"""Trees of values as tensors plus JSON, and back, without executing anything."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from stepguard.state.batch import NotPlainError, tree_from_json, tree_to_json

NAN = math.nan


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Any
    names: list[str]


class Encoding(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize(
    "value",
    [
        {
            "x": torch.ones(2),
            "n": 3,
            "f": NAN,
            "s": "word",
            "none": None,
            "flag": True,
            5: [1.5, (math.inf, -1)],
        },
        torch.zeros(0, 3),
        [torch.tensor(1), torch.ones(2, dtype=torch.bfloat16), torch.tensor([True])],
        (torch.randn(2, dtype=torch.complex64), torch.eye(2).to_sparse()),
    ],
)
def test_batches_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    back = tree_from_json(json.loads(json.dumps(tree_to_json(value, tensors, "batch"))), tensors)
    torch.testing.assert_close(back, value, rtol=0, atol=0, equal_nan=True) if not isinstance(
        value, dict
    ) else None
    assert type(back) is type(value)
    if isinstance(value, dict):
        assert list(back) == list(value)
        assert math.isnan(back["f"])
        assert back[5] == value[5]
        assert torch.equal(back["x"], value["x"])


def test_batches_with_names_come_back_as_look_alikes() -> None:
    tensors: dict[str, Tensor] = {}
    value = {
        "pair": Pair(torch.ones(2), 1),
        "record": Record(torch.zeros(1), ["a"]),
        "encoding": Encoding(ids=[7]),
    }
    back = tree_from_json(json.loads(json.dumps(tree_to_json(value, tensors, "batch"))), tensors)
    assert torch.equal(back["pair"].x, torch.ones(2))
    assert (back["pair"].y, back["record"].names, back["encoding"].ids) == (1, ["a"], [7])
    assert isinstance(back["pair"], tuple)


def test_arrays_stay_arrays_and_gradients_are_asked_for_again() -> None:
    tensors: dict[str, Tensor] = {}
    value = [np.arange(3.0), torch.ones(2, requires_grad=True)]
    array, tensor = tree_from_json(tree_to_json(value, tensors, "batch"), tensors)
    assert isinstance(array, np.ndarray)
    assert tensor.requires_grad


@pytest.mark.parametrize("value", [object(), {"x": {1, 2}}, [lambda: 0], {(1, 2): 3}])
def test_what_is_not_plain_is_said(value: Any) -> None:
    with pytest.raises(NotPlainError, match="can be kept"):
        tree_to_json(value, {}, "batch")


@pytest.mark.parametrize("name", ["__class__", "a b", "x: __import__('os')", ""])
def test_a_field_name_that_is_not_an_identifier_is_refused(name: str) -> None:
    for named in (True, False):
        with pytest.raises(ValueError, match="not a name of a field"):
            tree_from_json({"fields": [[name, 1]], "named": named}, {})
