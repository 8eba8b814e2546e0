"""Batches of any make: walked, cut, kept as JSON, refilled; and what one step is made of."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from stepguard.state.batch import (
    NotPlainError,
    Refill,
    batch_without,
    in_containers_of,
    named_tensors,
    part_named,
    samples_in,
    subset,
    tree_from_json,
    tree_to_json,
    unwrapped,
    with_children,
)


class ImagePair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass(frozen=True)
class ImageRecord:
    image: Tensor
    name: str


def names(batch: Any) -> list[str]:
    return [name for name, _ in named_tensors(batch)]


def test_tensors_are_named_by_key_field_position_or_attribute() -> None:
    one = torch.zeros(1)
    assert names(one) == [""]
    assert names({"x": one, 5: [one, one]}) == ["x", "5.0", "5.1"]
    assert names((ImagePair(one, one), "text")) == ["0.image", "0.label"]
    assert names(ImageRecord(one, "a")) == ["image"]
    assert names(SimpleNamespace(image=one, count=3)) == ["image"]
    assert names(UserDict(ids=one)) == ["ids"]


def test_a_rebuilt_batch_has_the_same_containers_and_leaves_the_original_alone() -> None:
    def double(_: str, item: Any) -> Any:
        return item * 2 if isinstance(item, Tensor) else item

    one = torch.ones(1)
    for batch in (
        {"x": one},
        [one],
        (one,),
        ImagePair(one, one),
        ImageRecord(one, "a"),
        UserDict(x=one),
        SimpleNamespace(x=one),
    ):
        twin = with_children(batch, double)
        assert type(twin) is type(batch)
        assert [float(t) for _, t in named_tensors(twin)] == [2.0] * len(names(batch))
        assert [float(t) for _, t in named_tensors(batch)] == [1.0] * len(names(batch))


# --- samples of a batch


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


def test_as_many_views_as_samples_stay_whole() -> None:
    views = [torch.ones(2, 3), torch.zeros(2, 3)]
    kept = subset({"views": views, "y": torch.arange(2)}, [1], 2)
    assert len(kept["views"]) == 2 and kept["views"][0].shape == (1, 3)


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


# --- trees of values as tensors and JSON


NAN = math.nan


class NamedPair(NamedTuple):
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
        "pair": NamedPair(torch.ones(2), 1),
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


# --- saved values in live objects


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


# --- what one step is made of


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group: what counts is the name and `.module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Holder(nn.Module):
    """A user's own module that happens to have a `.module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _compiled(model: nn.Module) -> nn.Module:
    wrapper = torch.compile(model, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


def test_wrappers_are_seen_through_in_any_order() -> None:
    model = nn.Linear(1, 1)
    assert unwrapped(_compiled(model)) is model
    assert unwrapped(nn.DataParallel(model)) is model
    assert unwrapped(DistributedDataParallel(_compiled(model))) is model
    assert unwrapped(_compiled(DistributedDataParallel(model))) is model


def test_module_of_the_user_with_the_same_attribute_is_kept() -> None:
    model = Holder(nn.Linear(1, 1))
    assert unwrapped(model) is model
