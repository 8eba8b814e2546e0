"""Walking batches of any make: names, non-finite parts, and the same batch with other tensors."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepguard.state.batch import (
    OUTPUT_GRADIENT,
    bad_batch_tensors,
    children,
    named_tensors,
    tensor_label,
    with_children,
)


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass(frozen=True)
class Record:
    image: Tensor
    name: str


def names(batch: Any) -> list[str]:
    return [name for name, _ in named_tensors(batch)]


def test_tensors_are_named_by_key_field_position_or_attribute() -> None:
    one = torch.zeros(1)
    assert names(one) == [""]
    assert names({"x": one, 5: [one, one]}) == ["x", "5.0", "5.1"]
    assert names((Pair(one, one), "text")) == ["0.image", "0.label"]
    assert names(Record(one, "a")) == ["image"]
    assert names(SimpleNamespace(image=one, count=3)) == ["image"]
    assert names(UserDict(ids=one)) == ["ids"]


def test_modules_and_recorded_output_gradients_are_not_part_of_a_batch() -> None:
    assert names({"x": torch.zeros(1), OUTPUT_GRADIENT: {0: torch.zeros(1)}}) == ["x"]
    assert list(children(nn.Linear(1, 1))) == []


def test_bad_tensors_are_labelled_once() -> None:
    bad = {"x": torch.tensor([math.nan]), "ids": torch.tensor([3])}
    assert bad_batch_tensors((bad, bad)) == ["batch:x"]
    assert bad_batch_tensors((torch.tensor([math.inf]),)) == ["batch"]
    assert tensor_label("x.0") == "batch:x.0"


def test_a_rebuilt_batch_has_the_same_containers_and_leaves_the_original_alone() -> None:
    def double(_: str, item: Any) -> Any:
        return item * 2 if isinstance(item, Tensor) else item

    one = torch.ones(1)
    for batch in (
        {"x": one},
        [one],
        (one,),
        Pair(one, one),
        Record(one, "a"),
        UserDict(x=one),
        SimpleNamespace(x=one),
    ):
        twin = with_children(batch, double)
        assert type(twin) is type(batch)
        assert [float(t) for _, t in named_tensors(twin)] == [2.0] * len(names(batch))
        assert [float(t) for _, t in named_tensors(batch)] == [1.0] * len(names(batch))


def test_a_leaf_is_returned_as_it_is() -> None:
    for leaf in ("text", 3, None, nn.Linear(1, 1)):
        assert with_children(leaf, lambda key, item: None) is leaf
