"""Batches as trees of named tensors: names, and subsets of samples."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepguard.locate.operands import batch_tensors
from stepguard.state.batch import sample_count, subset


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
    return [name for name, _ in batch_tensors(batch)]


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
