"""Batches as trees of named tensors: names, copies, repairs and subsets of samples."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepguard.locate.replay_state import duplicate, named_tensors, repaired, sample_count, subset


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "a"


class Own:
    def __init__(self) -> None:
        self.x = torch.ones(2)
        self.note = "kept"


def names(batch: Any) -> list[str]:
    return [name for name, _ in named_tensors(batch)]


def test_tensors_are_named_by_their_way_through_the_tree() -> None:
    one = torch.ones(2)
    assert names(one) == ["batch"]
    assert names({"x": one, "boxes": [one, (one, 3)]}) == [
        "batch:x",
        "batch:boxes.0",
        "batch:boxes.1.0",
    ]
    assert names(Pair(one, one)) == ["batch:x", "batch:y"]
    assert names(Frozen(one)) == ["batch:x"]
    assert names(UserDict(x=one)) == ["batch:x"]
    assert names(Own()) == ["batch:x"]


def test_copy_is_independent_and_keeps_classes_and_gradients() -> None:
    pair = Pair(torch.ones(2), torch.ones(2, requires_grad=True))
    batch: dict[str, Any] = {"pair": pair, "own": Own()}
    twin = duplicate(batch)
    twin["pair"].x.zero_()
    twin["own"].x.zero_()
    assert batch["pair"].x.tolist() == [1.0, 1.0] and batch["own"].x.tolist() == [1.0, 1.0]
    assert type(twin["pair"]) is Pair and twin["pair"].y.requires_grad
    assert not twin["pair"].x.requires_grad
    assert twin["own"].note == "kept"


def test_repair_puts_the_mean_in_the_named_tensors_only() -> None:
    bad = torch.tensor([1.0, math.nan, 3.0])
    mended = repaired({"x": bad, "y": bad}, frozenset({"batch:x"}))
    assert mended["x"].tolist() == [1.0, 2.0, 3.0]
    assert mended["y"] is bad
    hopeless = repaired(torch.tensor([math.nan]), frozenset({"batch"}))
    assert hopeless.tolist() == [1.0]


def test_samples_are_counted_and_picked() -> None:
    batch = {"x": torch.arange(6.0).reshape(3, 2), "files": ["a", "b", "c"], "scale": 2.0}
    assert sample_count(batch) == 3
    kept = subset(batch, [0, 2], 3)
    assert kept["x"].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert kept["files"] == ["a", "c"]
    assert kept["scale"] == 2.0


def test_as_many_views_as_samples_stay_whole() -> None:
    views = [torch.ones(2, 3), torch.zeros(2, 3)]
    kept = subset({"views": views, "y": torch.arange(2)}, [1], 2)
    assert len(kept["views"]) == 2 and kept["views"][0].shape == (1, 3)
