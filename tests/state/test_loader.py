"""The indices behind a batch, a loader's position, and batches that are passed over."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from stepguard.state.batch import tree_from_json, tree_to_json
from stepguard.state.loader import ResumableLoader, observe_loaders, stop_observing
from stepguard.state.rng import capture_rng
from stepguard.tensors.torch_private import LoaderIterator

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
SIZE, BATCH = 22, 4


class Noisy(Dataset[Tensor]):
    """Says its index and draws from all three generators, as augmentations do."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, list):
            return torch.stack([self[i] for i in index])
        return torch.tensor(
            [index, float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64
        )


class Buckets:
    """A batch sampler of the user's own, which fills the same list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for start in (8, 0, 16, 3):
            batch[:] = [start, start + 2, start + 1]
            yield batch

    def __len__(self) -> int:
        return 4


class Tensors:
    """A sampler that yields tensors."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randperm(SIZE)

    def __len__(self) -> int:
        return SIZE


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


KINDS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "in order": lambda: DataLoader(Noisy(), BATCH),
    "generator": lambda: DataLoader(Noisy(), BATCH, shuffle=True, generator=_generator()),
    "drop last": lambda: DataLoader(Noisy(), BATCH, shuffle=True, drop_last=True),
    "one by one": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "batches as keys": lambda: DataLoader(
        Noisy(),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(Noisy()), BATCH, drop_last=False),
    ),
    "own batch sampler": lambda: DataLoader(Noisy(), batch_sampler=Buckets()),
    "list of batches": lambda: DataLoader(Noisy(), batch_sampler=[[3, 1], [0, 7, 5]]),
    "sampler of tensors": lambda: DataLoader(Noisy(), BATCH, sampler=Tensors()),
    "distributed": lambda: DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), 2, 1)),
    "workers": lambda: DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
    "workers, generator": lambda: DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=2, generator=_generator()
    ),
    "workers, one by one": lambda: DataLoader(
        Noisy(), batch_size=None, shuffle=True, num_workers=2
    ),
    "workers, own batch sampler": lambda: DataLoader(
        Noisy(), batch_sampler=[[8, 2], [1, 3, 5], [0]], num_workers=1
    ),
    "persistent workers": lambda: DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "stateful": lambda: StatefulDataLoader(Noisy(), BATCH, shuffle=True),
    "stateful, own batch sampler": lambda: StatefulDataLoader(Noisy(), batch_sampler=Buckets()),
    "stateful, workers": lambda: StatefulDataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
}


def _seed() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)


def _feed(
    loader: Any, said: list[str] | None = None, step: Callable[[], int] = lambda: 0
) -> ResumableLoader:
    return ResumableLoader(loader, lambda: None, (said if said is not None else []).append, step)


def _rng(loader: Any) -> list[Any]:
    own = getattr(loader, "generator", None)
    drawn = [torch.get_rng_state(), *([] if own is None else [own.get_state()])]
    numbers = [bytes(state.numpy()) for state in drawn]
    return [*numbers, random.getstate(), bytes(np.random.get_state()[1])]


def _rows(batch: Tensor) -> list[int]:
    """The samples that a batch of `Noisy` is made of."""
    return batch.reshape(-1, 4)[:, 0].int().tolist()


@pytest.fixture(autouse=True)
def _workers_end_with_their_loader(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("process"):
        gc.collect()


def _passes(given: Any, loader: Any) -> list[Any]:
    """Two passes with a draw of the loop's own between batches, and every random state after each
    batch.
    """
    _seed()
    seen: list[Any] = []
    for _ in range(2):
        for batch in given() if callable(given) else given:
            seen.append((batch.tolist(), torch.rand(1).tolist(), _rng(loader)))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_random_numbers_are_those_of_the_bare_loader_and_indices_are_known(
    kind: str,
) -> None:
    _seed()
    bare = KINDS[kind]()
    expected = _passes(bare, bare)
    _seed()
    loader = KINDS[kind]()
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    feed = _feed(loader)

    def known() -> Iterator[Tensor]:
        for batch in feed:
            assert feed.indices_of(batch) == _rows(batch)
            yield batch

    assert _passes(known, loader) == expected
    assert loader.sampler is sampler and loader.batch_sampler is batch_sampler


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["shuffle", "stateful", "stateful, own batch sampler", "stateful, workers"]
)
def test_indices_are_known_after_going_to_a_position(kind: str) -> None:
    _seed()
    feed = _feed(KINDS[kind]())
    iterator = iter(feed)
    next(iterator), next(iterator)
    position = feed.position()
    rest = [_rows(batch) for batch in iterator]
    other = _feed(KINDS[kind]())
    other.go_to(position, None)
    assert [other.indices_of(batch) for batch in other] == rest


@pytest.mark.parametrize("kind", ["generator", "one by one", "persistent workers"])
def test_loader_that_no_guard_was_given_is_observed_and_stays_as_it_is(kind: str) -> None:
    _seed()
    bare = KINDS[kind]()
    expected = _passes(bare, bare)
    methods = dict(vars(LoaderIterator))
    recent = observe_loaders(lambda: 0)
    _seed()
    loader = KINDS[kind]()
    assert _passes(loader, loader) == expected
    for batch in loader:
        found = recent.find(batch)
        assert found is not None
        assert found.indices == tuple(_rows(batch))
        assert found.delivered.place is None
    stop_observing(recent)
    assert dict(vars(LoaderIterator)) == methods


@pytest.mark.process
def test_iterator_whose_first_batches_nobody_saw_tells_no_wrong_rows() -> None:
    _seed()
    loader = KINDS["persistent workers"]()
    iterator = iter(loader)
    next(iterator)
    recent = observe_loaders(lambda: 0)
    assert all(recent.find(batch) is None for batch in iterator)
    first = next(iter(loader))
    assert recent.find(first) is not None
    stop_observing(recent)


@pytest.mark.process
def test_nothing_of_the_guard_stays_in_a_loader_with_persistent_workers() -> None:
    _seed()
    loader = KINDS["persistent workers"]()
    feed = _feed(loader)
    for _ in feed:
        break
    assert loader._iterator._index_sampler is loader.batch_sampler
    bare = [_rows(batch) for batch in loader]
    assert sorted(index for batch in bare for index in batch) == list(range(SIZE))
    assert all(feed.indices_of(batch) == _rows(batch) for batch in feed)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


class Doubled(DataLoader[Any]):
    """Its own way to iterate: nobody knows which batch comes from which indices."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch.clone()


class Words(Dataset[Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: str) -> Tensor:
        return torch.zeros(2)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), BATCH),
        Doubled(Noisy(), BATCH),
        [torch.zeros(2)],
        pytest.param(
            DataLoader(Noisy(), BATCH, num_workers=1, in_order=False), marks=pytest.mark.process
        ),
    ],
    ids=["iterable data set", "own iteration", "list", "out of order"],
)
def test_no_indices_where_nobody_knows_them(loader: Any) -> None:
    feed = _feed(loader)
    places = [(feed.indices_of(batch), feed.where(batch)) for batch in feed]
    assert places == [(None, (0, number)) for number in range(len(places))]


def test_keys_of_a_data_set_by_name_are_its_indices() -> None:
    feed = _feed(DataLoader(Words(), batch_sampler=[["a", "b"], ["c"]]))
    assert [feed.indices_of(batch) for batch in feed] == [["a", "b"], ["c"]]


@dataclass
class Pair:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    "again",
    [
        lambda x, y: (x, y),
        lambda x, y: {"inputs": x, "more": {"labels": y, "scale": 1.0}},
        lambda x, y: [y],
        lambda x, y: Pair(x, y),
        lambda x, y: {"x": x.to("cpu"), "mask": torch.ones(4)},
    ],
)
def test_batch_that_the_loop_has_packed_anew_is_known_by_its_tensors(
    again: Callable[[Tensor, Tensor], Any],
) -> None:
    loader = DataLoader(
        torch.utils.data.TensorDataset(torch.rand(12, 2), torch.rand(12)), 4, shuffle=True
    )
    feed = _feed(loader)
    for number, (x, y) in enumerate(feed):
        whole = feed.indices_of((x, y))
        assert whole is not None and sorted(whole) != whole
        assert feed.indices_of(again(x, y)) == whole and feed.where(again(x, y)) == (0, number)


@pytest.mark.parametrize("part", [slice(4, 8), slice(0, 3), slice(5, None, 3)])
def test_slice_of_a_batch_has_the_indices_of_its_rows(part: slice) -> None:
    feed = _feed(DataLoader(Noisy(), 11, shuffle=True))
    for batch in feed:
        assert feed.indices_of({"x": batch[part]}) == batch[part][:, 0].int().tolist()
        assert feed.indices_of(batch[:, 1:]) is None


def test_stranger_is_not_taken_for_a_batch() -> None:
    feed = _feed(DataLoader(Noisy(), BATCH))
    for batch in feed:
        assert feed.indices_of(batch.clone()) is None and feed.where(batch * 2) is None
    assert feed.indices_of("text") is None


def test_tensor_that_all_batches_share_tells_nothing() -> None:
    mask = torch.ones(3)
    feed = _feed([{"mask": mask, "x": torch.rand(3)} for _ in range(3)])
    first, second, _ = list(feed)
    assert feed.where({"mask": mask}) is None
    assert (feed.where(first), feed.where({"x": second["x"], "mask": mask})) == ((0, 0), (0, 1))


def test_no_batch_is_kept_alive() -> None:
    feed = _feed(DataLoader(Noisy(), BATCH))
    iterator = iter(feed)
    first = next(iterator)
    gone = weakref.ref(first)
    del first
    next(iterator)
    assert gone() is None


def test_batches_are_remembered_by_the_step_they_were_delivered_for() -> None:
    step = [0]
    feed = _feed(DataLoader(Noisy(), BATCH), step=lambda: step[0])
    for number, _ in enumerate(feed):
        step[0] = (number + 1) // 2
    assert [each.number for each in feed.recent.of_step(1)] == [2, 3]
    assert feed.recent.of_step(9) == []


class Broken:
    def __iter__(self) -> Iterator[list[int]]:
        raise ValueError("no order today")

    def __len__(self) -> int:
        return 1


def test_sampler_that_fails_leaves_the_loader_as_it_was() -> None:
    broken = Broken()
    loader = DataLoader(Noisy(), batch_sampler=broken)
    with pytest.raises(ValueError, match="no order today"):
        next(iter(_feed(loader)))
    assert loader.batch_sampler is broken


class Loud(dict[str, Tensor]):
    """A container of the user's own: none of its code runs for being remembered."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __iter__(self) -> Any:
        raise AssertionError("iterated")

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("asked")


class Silent:
    def __init__(self, x: Tensor) -> None:
        object.__setattr__(self, "x", x)

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize("kind", [Loud, Silent])
def test_remembering_a_batch_runs_no_code_of_its_class(kind: Any) -> None:
    x = torch.rand(3)
    feed = _feed([kind({"x": x}) if kind is Loud else kind(x)])
    for batch in feed:
        assert feed.where(batch) == feed.where({"again": x}) == (0, 0)


def test_rows_of_a_split_are_those_of_the_whole_data_set() -> None:
    _, part = torch.utils.data.random_split(Noisy(), [10, 12], torch.Generator().manual_seed(0))
    nested = torch.utils.data.Subset(part, torch.tensor([11, 0, 5, 7]))
    for data in (part, nested):
        feed = _feed(DataLoader(data, 3, shuffle=True))
        for batch in feed:
            assert feed.indices_of(batch) == batch[:, 0].int().tolist()


# --- a loader's position


PASS = -(-SIZE // BATCH)


class Calm(Noisy):
    """Draws nothing: torchdata does not bring the generators of its workers back."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, 1.0, 2.0, 3.0], dtype=torch.float64)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


def _loader_of(kind: str) -> Any:
    if kind == "list":
        return [torch.tensor([float(i)]) for i in range(PASS)]
    if kind == "iterable":
        return DataLoader(Endless(), batch_size=BATCH)
    if kind == "generator":
        return DataLoader(
            Noisy(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
    maker = StatefulDataLoader if kind.startswith("stateful") else DataLoader
    workers = 2 if kind.endswith("workers") else 0
    return maker(
        Calm() if kind == "stateful-workers" else Noisy(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
    )


def _feed_of(kind: str, said: list[str] | None = None) -> ResumableLoader:
    return ResumableLoader(
        _loader_of(kind), lambda: None, (said if said is not None else []).append
    )


def _through_a_file(position: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    structure = json.loads(json.dumps(tree_to_json(position, tensors, "loader/0")))
    found: dict[str, Any] = tree_from_json(
        structure, {name: t.clone() for name, t in tensors.items()}
    )
    return found


def _draws(feed: ResumableLoader, count: int) -> list[Tensor]:
    """The next batches over as many passes as needed, with a draw of the loop's after each."""
    found: list[Tensor] = []
    while len(found) < count:
        for batch in feed:
            found.append(
                torch.cat([torch.as_tensor(batch).double().flatten(), torch.rand(1).double()])
            )
            if len(found) == count:
                break
    return found


POSITIONED = [
    "list",
    "plain",
    "iterable",
    "generator",
    "plain-workers",
    "stateful",
    "stateful-workers",
]


# workers start slowly, and their second pass is no different
STOPS = [(kind, 3) for kind in POSITIONED] + [
    (kind, PASS + 2) for kind in POSITIONED if not kind.endswith("workers")
]


@pytest.mark.parametrize(("kind", "stop"), STOPS)
def test_loop_that_stops_and_goes_on_elsewhere_sees_what_one_that_never_stopped_sees(
    kind: str, stop: int
) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    feed, kept = _feed_of(kind), {}

    def note() -> None:
        if feed.epoch * PASS + feed.delivered == stop and not kept:
            kept["position"], kept["rng"] = _through_a_file(feed.position()), capture_rng()

    feed._between = note
    whole = _draws(feed, PASS * 2 - 1)
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    other = _feed_of(kind)
    other.go_to(kept["position"], kept["rng"])
    rest = _draws(other, PASS * 2 - 1 - stop)
    feed._between = other._between  # no circle: workers end with their loader
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[stop:], strict=True))


def test_skipping_is_said_and_a_loader_with_its_own_position_needs_none() -> None:
    for kind, lines in (("plain", 1), ("stateful", 0)):
        said: list[str] = []
        feed = _feed_of(kind)
        iterator = iter(feed)
        next(iterator), next(iterator)
        other = _feed_of(kind, said)
        other.go_to(feed.position(), None)
        next(iter(other))
        assert len(said) == lines
        assert all("batches fetched again by seed and dropped: 2" in line for line in said)


def test_loader_that_has_become_shorter_is_said() -> None:
    said: list[str] = []
    feed = ResumableLoader([1, 2], lambda: None, said.append)
    begun = _feed_of("list")
    next(iter(begun))
    feed.go_to({**begun.position(), "delivered": 5}, None)
    assert list(feed) == []
    assert "(batches missing: 3)" in said[0]


def test_position_that_was_gone_to_is_kept_until_the_loop_begins() -> None:
    feed, other = _feed_of("plain"), _feed_of("plain")
    next(iter(feed))
    other.go_to(feed.position(), None)
    assert other.position() == feed.position()


def test_loaders_own_attributes_are_there() -> None:
    feed = ResumableLoader(
        DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2), lambda: None, print
    )
    assert len(feed) == 4 and feed.batch_size == 2 and len(feed.dataset) == 8
    with pytest.raises(AttributeError):
        _ = feed.nothing


# --- batches that were left out before


def _feed_and_said(size: int = 10, loader: Any = None) -> tuple[ResumableLoader, list[str]]:
    said: list[str] = []
    return ResumableLoader(
        loader if loader is not None else list(range(size)), lambda: None, said.append
    ), said


def test_one_line_for_each_stretch_names_it_and_the_cause() -> None:
    feed, said = _feed_and_said()
    places = [(0, n) for n in (2, 3, 4, 7, 9)]
    feed.pass_over(places, causes={(0, 2): "SG101", (0, 4): "SG101", (0, 7): "SG202"})
    list(feed)
    assert said == [
        "skipping batches 2-4 of pass 0: dropped before as SG101",
        "skipping batch 7 of pass 0: dropped before as SG202",
        "skipping batch 9 of pass 0: dropped before",
    ]


def test_batch_without_indices_is_passed_over_only_in_the_pass_the_loader_is_at() -> None:
    feed, said = _feed_and_said(3)
    feed.pass_over({(0, 1), (1, 1)})
    assert [list(feed), list(feed)] == [[0, 2], [0, 1, 2]] and len(said) == 1


def test_batch_made_of_other_samples_is_delivered() -> None:
    loader = DataLoader(torch.arange(12), batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    feed, said = _feed_and_said(loader=loader)
    known = {(0, 0): [1], (0, 1): [99], (0, 2): [6, 1], (1, 1): [3, 4, 5]}
    feed.pass_over(known, indices=known)
    assert [batch.tolist() for batch in feed] == [[3, 4, 5], [6, 7, 8]]
    assert [batch.tolist() for batch in feed] == [[0, 1, 2], [6, 7, 8]]
    assert len(said) == 2


def test_position_in_the_middle_of_a_stretch_goes_on_behind_it() -> None:
    feed, _ = _feed_and_said()
    feed.pass_over({(0, 1), (0, 2)})
    iterator = iter(feed)
    assert [next(iterator), next(iterator)] == [0, 3]
    other, _ = _feed_and_said()
    other.go_to(feed.position(), None)
    other.pass_over({(0, 1), (0, 2), (0, 5)})
    assert list(other) == [4, 6, 7, 8, 9]
