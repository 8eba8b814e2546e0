"""A loader's position: saved, gone back to in a new process, and exact for what the loader draws
and skips.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from stepguard.state.batch import tree_from_json, tree_to_json
from stepguard.state.loader import ResumableLoader
from stepguard.state.rng import capture_rng

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
SIZE, BATCH = 22, 4
PASS = -(-SIZE // BATCH)


class Noisy(Dataset[Tensor]):
    """Every fetch draws from all three generators, as augmentations do."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(
            [index, float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64
        )


class Calm(Noisy):
    """Draws nothing: torchdata does not bring the generators of its workers back."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, 1.0, 2.0, 3.0], dtype=torch.float64)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


def _loader(kind: str) -> Any:
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


def _feed(kind: str, said: list[str] | None = None) -> ResumableLoader:
    return ResumableLoader(_loader(kind), lambda: None, (said if said is not None else []).append)


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


KINDS = ["list", "plain", "iterable", "generator", "plain-workers", "stateful", "stateful-workers"]


# workers of a stateful loader start slowly, and its second pass is no different
STOPS = [(kind, 3) for kind in KINDS] + [
    (kind, PASS + 2) for kind in KINDS if kind != "stateful-workers"
]


@pytest.mark.parametrize(("kind", "stop"), STOPS)
def test_loop_that_stops_and_goes_on_elsewhere_sees_what_one_that_never_stopped_sees(
    kind: str, stop: int
) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    feed, kept = _feed(kind), {}

    def note() -> None:
        if feed.epoch * PASS + feed.delivered == stop and not kept:
            kept["position"], kept["rng"] = _through_a_file(feed.position()), capture_rng()

    feed._between = note
    whole = _draws(feed, PASS * 2 - 1)
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    other = _feed(kind)
    other.go_to(kept["position"], kept["rng"])
    rest = _draws(other, PASS * 2 - 1 - stop)
    feed._between = other._between  # no circle: workers end with their loader
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[stop:], strict=True))


def test_position_counts_passes_and_batches() -> None:
    feed = _feed("list")
    assert feed.position() == {"epoch": 0, "delivered": 0, "begun": None, "state": None}
    for _ in feed:
        pass
    iterator = iter(feed)
    next(iterator), next(iterator)
    position = feed.position()
    assert (position["epoch"], position["delivered"]) == (1, 2)


def test_skipping_is_said_and_a_loader_with_its_own_position_needs_none() -> None:
    for kind, lines in (("plain", 1), ("stateful", 0)):
        said: list[str] = []
        feed = _feed(kind)
        iterator = iter(feed)
        next(iterator), next(iterator)
        other = _feed(kind, said)
        other.go_to(feed.position(), None)
        next(iter(other))
        assert len(said) == lines
        assert all("2 batches were fetched again by seed and dropped" in line for line in said)


def test_loader_that_has_become_shorter_is_said() -> None:
    said: list[str] = []
    feed = ResumableLoader([1, 2], lambda: None, said.append)
    begun = _feed("list")
    next(iter(begun))
    feed.go_to({**begun.position(), "delivered": 5}, None)
    assert list(feed) == []
    assert "3 batches early" in said[0]


def test_position_that_was_gone_to_is_kept_until_the_loop_begins() -> None:
    feed, other = _feed("plain"), _feed("plain")
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
