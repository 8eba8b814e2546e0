"""How many samples a batch has, and the batch without some of them; what might be cut wrongly is
refused.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from stepguard.state.batch import batch_without, part_named, samples_in

Point = namedtuple("Point", "x y")


@dataclass
class Pair:
    x: Tensor
    names: list[str]
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


class Own:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def rows(count: int, *more: int) -> Tensor:
    """Row k is full of k."""
    return (
        torch.arange(float(count)).reshape(count, *(1 for _ in more)).expand(count, *more).clone()
    )


def images(count: int) -> list[Tensor]:
    return [torch.full((3, 4 + k, 4), float(k)) for k in range(count)]


def plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict | UserDict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else value


CUT = {
    "tensor": (rows(4), rows(4)[[0, 2]]),
    "pair": ((rows(4, 2), rows(4)), (rows(4, 2)[[0, 2]], rows(4)[[0, 2]])),
    "list of a collate function": ([rows(4, 2), rows(4)], [rows(4, 2)[[0, 2]], rows(4)[[0, 2]]]),
    "dict with numbers and words": (
        {"x": rows(4), "t": 0.5, "kind": "a", "none": None, "weight": torch.tensor(3.0)},
        {"x": rows(4)[[0, 2]], "t": 0.5, "kind": "a", "none": None, "weight": torch.tensor(3.0)},
    ),
    "names beside": (
        {"x": rows(4), "file": ["a", "b", "c", "d"]},
        {"x": rows(4)[[0, 2]], "file": ["a", "c"]},
    ),
    "list of another length": (
        {"x": rows(4), "classes": ["p", "q"]},
        {"x": rows(4)[[0, 2]], "classes": ["p", "q"]},
    ),
    "nested": (
        {"in": {"x": (rows(4), rows(4, 2))}},
        {"in": {"x": (rows(4)[[0, 2]], rows(4, 2)[[0, 2]])}},
    ),
    "named tuple": (Point(rows(4), rows(4, 3)), Point(rows(4)[[0, 2]], rows(4, 3)[[0, 2]])),
    "data class": (Pair(rows(4), ["a", "b", "c", "d"]), Pair(rows(4)[[0, 2]], ["a", "c"])),
    "ordered dict": (OrderedDict(x=rows(4)), OrderedDict(x=rows(4)[[0, 2]])),
    "BatchEncoding": (
        BatchEncoding({"input_ids": rows(4, 5)}),
        BatchEncoding({"input_ids": rows(4, 5)[[0, 2]]}),
    ),
    "array": ({"x": rows(4), "a": np.arange(4)}, {"x": rows(4)[[0, 2]], "a": np.array([0, 2])}),
    "images of different sizes": ((images(4), rows(4)), (images(4)[::2], rows(4)[[0, 2]])),
    "detection": (
        (tuple(images(4)), tuple({"boxes": rows(k + 1, 4)} for k in range(4))),
        (tuple(images(4)[::2]), tuple({"boxes": rows(k + 1, 4)} for k in (0, 2))),
    ),
    "list of samples": (
        [{"x": rows(k + 2)} for k in range(4)],
        [{"x": rows(k + 2)} for k in (0, 2)],
    ),
}


@pytest.mark.parametrize("kind", CUT)
def test_bad_samples_are_cut_out(kind: str) -> None:
    batch, expected = CUT[kind]
    before = plain(batch)
    cut = batch_without(batch, [3, 1])
    assert samples_in(batch) == 4
    assert type(cut) is type(expected) and plain(cut) == plain(expected)
    assert plain(batch) == before


def test_slotted_data_class_and_gradients_of_inputs_are_kept() -> None:
    x = rows(3).requires_grad_()
    cut = batch_without(Frozen(x), [0])
    assert (
        isinstance(cut, Frozen)
        and cut.x.requires_grad
        and cut.x.is_leaf
        and cut.x.tolist() == [1.0, 2.0]
    )


REFUSED = {
    "graph": {"x": rows(6, 2), "edge_index": torch.zeros(2, 9, dtype=torch.long), "y": rows(6)},
    "weights of another size": (rows(4), torch.ones(10)),
    "time first": (rows(7, 4), rows(4)),
    "sparse": torch.eye(4).to_sparse(),
    "sparse beside": {"y": rows(4), "adjacency": torch.eye(4).to_sparse()},
    "packed sequence": pack_sequence([rows(4), rows(2)]),
    "packed sequence beside": (rows(2), pack_sequence([rows(4), rows(2)])),
    "class of the user's own": Own(rows(4)),
    "class of the user's own beside": (rows(4), Own(rows(4))),
    "scalar": torch.tensor(1.0),
    "words": ["a", "b"],
    "nothing": None,
    "two views of two samples": {"views": [rows(2, 5), rows(2, 5)]},
    "three images with three channels": (images(3), rows(3)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_might_be_cut_wrongly_is_refused(kind: str) -> None:
    assert samples_in(REFUSED[kind]) is None and batch_without(REFUSED[kind], [0]) is None


@pytest.mark.parametrize("bad", [[], [0, 1, 2, 3], [4], [-1]])
def test_nothing_to_cut_nothing_left_or_no_such_row_is_refused(bad: list[int]) -> None:
    assert batch_without(rows(4), bad) is None


class Hostile(UserDict[str, Tensor]):
    def __setitem__(self, key: str, value: Tensor) -> None:
        if getattr(self, "closed", False):
            raise RuntimeError("closed")
        super().__setitem__(key, value)


def test_container_that_refuses_other_sizes_is_refused() -> None:
    batch = Hostile(x=rows(4))
    batch.closed = True  # type: ignore[attr-defined]
    assert samples_in(batch) == 4 and batch_without(batch, [1]) is None


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ({"id": [7]}, "id"),
        (Point(1, [7]), "y"),
        ((1, {"id": [7]}), "1.id"),
        ({"a": {"b.c": [7]}}, "a.b.c"),
    ],
)
def test_part_is_found_by_its_name(batch: Any, key: str) -> None:
    assert part_named(batch, key) == [7] and part_named(batch, "nothing") is None
