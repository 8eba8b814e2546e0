"""Batches that were left out before: passed over, counted, said once, and only where they are the
same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from stepguard.state.loader import ResumableLoader


def _feed(size: int = 10, loader: Any = None) -> tuple[ResumableLoader, list[str]]:
    said: list[str] = []
    return ResumableLoader(
        loader if loader is not None else list(range(size)), lambda: None, said.append
    ), said


def test_known_batches_are_not_delivered_again_but_counted() -> None:
    feed, _ = _feed()
    feed.pass_over({(0, 3), (0, 4)})
    seen = [(batch, feed.delivered) for batch in feed]
    assert [batch for batch, _ in seen] == [0, 1, 2, 5, 6, 7, 8, 9]
    assert seen[3] == (5, 6) and feed.epoch == 1


def test_one_line_for_each_stretch_names_it_and_the_cause() -> None:
    feed, said = _feed()
    places = [(0, n) for n in (2, 3, 4, 7, 9)]
    feed.pass_over(places, causes={(0, 2): "SG101", (0, 4): "SG101", (0, 7): "SG202"})
    list(feed)
    assert said == [
        "skipping batches 2-4 of pass 0: dropped before as SG101",
        "skipping batch 7 of pass 0: dropped before as SG202",
        "skipping batch 9 of pass 0: dropped before",
    ]


def test_batch_without_indices_is_passed_over_only_in_the_pass_the_loader_is_at() -> None:
    feed, said = _feed(3)
    feed.pass_over({(0, 1), (1, 1)})
    assert [list(feed), list(feed)] == [[0, 2], [0, 1, 2]] and len(said) == 1


def test_batch_made_of_other_samples_is_delivered() -> None:
    loader = DataLoader(torch.arange(12), batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    feed, said = _feed(loader=loader)
    known = {(0, 0): [1], (0, 1): [99], (0, 2): [6, 1], (1, 1): [3, 4, 5]}
    feed.pass_over(known, indices=known)
    assert [batch.tolist() for batch in feed] == [[3, 4, 5], [6, 7, 8]]
    assert [batch.tolist() for batch in feed] == [[0, 1, 2], [6, 7, 8]]
    assert len(said) == 2


def test_position_in_the_middle_of_a_stretch_goes_on_behind_it() -> None:
    feed, _ = _feed()
    feed.pass_over({(0, 1), (0, 2)})
    iterator = iter(feed)
    assert [next(iterator), next(iterator)] == [0, 3]
    other, _ = _feed()
    other.go_to(feed.position(), None)
    other.pass_over({(0, 1), (0, 2), (0, 5)})
    assert list(other) == [4, 6, 7, 8, 9]
