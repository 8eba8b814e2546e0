"""Ranks follow the first one's grid of snapshots. The processes are in tests/distributed."""

from __future__ import annotations

from typing import cast

from stepguard.engine.recover.snapshots import KEPT, RankCadence, cadence_of
from stepguard.sentinel.rank_agreement import Agreement
from stepguard.state.snapshot import Cadence


class Words:
    """One rank's side of a store that all ranks share."""

    def __init__(self, rank: int, store: dict[str, str], mode: str = "spread") -> None:
        self.rank = rank
        self.store = store
        self.mode = mode

    def tell(self, about: str, text: str) -> None:
        if text:
            self.store[about] = text
        else:
            self.store.pop(about)

    def told(self, about: str) -> str:
        return self.store.get(about, "")


class Clock:
    """A second a step."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(rank: int, store: dict[str, str], mode: str = "spread") -> Cadence:
    agreement = cast(Agreement, Words(rank, store, mode))
    return cadence_of(agreement, "auto", Clock())


def taken(cadences: list[Cadence], costs: list[float], steps: range) -> list[list[int]]:
    """At which steps each rank took one, where a snapshot costs it so many seconds."""
    found: list[list[int]] = [[] for _ in cadences]
    for step in steps:
        for cadence, cost, own in zip(cadences, costs, found, strict=True):
            cast(Clock, cadence.clock).now = float(step)
            if cadence.due(step):
                cadence.took(step, cost)
                own.append(step)
    return found


def test_a_slow_and_a_quick_rank_take_them_at_the_same_steps() -> None:
    for costs in ([1e-9, 0.9], [0.9, 1e-9]):
        store: dict[str, str] = {}
        first, second = taken([made(0, store), made(1, store)], costs, range(1000))
        assert first == second
        assert first[:5] == [1, 8, 16, 24, 32]


def test_the_grid_follows_the_first_ranks_cost_at_a_step_that_all_know() -> None:
    store: dict[str, str] = {}
    first, second = taken([made(0, store), made(1, store)], [0.9, 0.0], range(2000))
    assert first == second
    # 0.9 seconds are 0.5 % of 180 steps; the grid above is 256
    assert first[-2:] == [1536, 1792]


def test_few_changes_stay_in_the_store() -> None:
    store: dict[str, str] = {}
    cadence = made(0, store)
    assert isinstance(cadence, RankCadence)
    for step in range(64, 64 * 100, 64):
        cadence._said = -1  # as if it had changed its mind
        cadence.took(step, 0.0)
    assert len(store) == KEPT


def test_one_process_asks_no_store() -> None:
    assert type(made(0, {}, "alone")) is Cadence
